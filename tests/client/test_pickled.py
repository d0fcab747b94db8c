"""A function that travels as a pickle: what source text cannot carry, run for real on a rank of the same Python."""

import decimal
import json
import pathlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import basilica
from basilica.client.options import parse_options
from basilica.core.errors import ValidationError
from basilica.shipping import pickled
from basilica.shipping.source import Shipped, ship

LIMIT = decimal.Decimal("0.5")


def rank(shipped: Shipped, folder: Path, *, python: str = sys.executable, site: bool = True) -> tuple[int, Any, str]:
    """Exit code, result and stderr of a rank that has cloudpickle and nothing of ours."""
    result = folder / "results" / "0.json"
    env = {"BASILICA_RESULT_FILE": str(result), **shipped.env}
    line = [python, *([] if site else ["-S"]), "-I", *shipped.argv[1:]]
    done = subprocess.run(line, env=env, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(result.read_text()) if result.exists() else None, done.stderr


def answer(folder: Path, source: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    code, found, complained = rank(ship(source, args=args, kwargs=kwargs, by="pickle", remote=True), folder)
    assert code == 0, complained
    return found


class Model:
    """Of this module, which the rank does not have."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def times(self, number: int) -> int:
        return self.factor * number


def helper(number: int) -> str:
    return str(LIMIT * number)


def test_closures_over_objects_lambdas_methods_and_other_arguments_travel(tmp_path: Path) -> None:
    model = Model(7)

    def closure(path: pathlib.PurePosixPath, *, more: Model) -> list[Any]:
        return [model.times(6), helper(3), path.name, more.factor]

    with pytest.raises(ValidationError, match="deploy with ship='pickle' if it can be pickled"):
        ship(closure, args=(pathlib.PurePosixPath("/a/b"),), kwargs={"more": Model(1)})
    assert answer(tmp_path, closure, pathlib.PurePosixPath("/a/b"), more=Model(1)) == [42, "1.5", "b", 1]
    assert answer(tmp_path, lambda number: number + 1, 2) == 3
    assert answer(tmp_path, model.times, 3) == 21

    async def later() -> int:
        return model.factor

    assert answer(tmp_path, later) == 7


@basilica.distributed(world_size=basilica.WorldSize(1, 1, 1), ship="pickle")
def decorated(number: int) -> str:
    return helper(number)


def test_our_decorator_stays_here_and_may_ask_for_it(tmp_path: Path) -> None:
    assert answer(tmp_path, decorated, 5) == "2.5"


def test_what_cannot_be_pickled_is_refused_before_a_run_is_made() -> None:
    lock = threading.Lock()

    def f() -> object:
        return lock

    with pytest.raises(ValidationError, match=r"source: cannot be pickled: TypeError: cannot pickle .*lock.*got 'f'"):
        ship(f, by="pickle")
    with pytest.raises(ValidationError, match="source_args: helper: missing a required argument"):
        ship(helper, by="pickle")
    with pytest.raises(ValidationError, match="only a function travels as a pickle"):
        ship("print()\n", by="pickle")
    with pytest.raises(ValidationError, match="must be 'source' or 'pickle'"):
        parse_options("run", {"world_size": basilica.WorldSize(1, 1, 1), "source": helper, "ship": "dill"})


def test_an_exception_is_told_with_its_lines_numbers(tmp_path: Path) -> None:
    def fails() -> None:
        raise KeyError("here")

    code, found, complained = rank(ship(fails, by="pickle"), tmp_path)
    assert (code, found) == (1, None)
    assert complained.endswith("KeyError: 'here'\n")
    assert f'File "{__file__}", line {fails.__code__.co_firstlineno + 1}, in fails' in complained
    assert "<basilica>" not in complained


def test_without_cloudpickle_there_is_a_sentence_on_either_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = ship(helper, args=(1,), by="pickle")
    code, _, complained = rank(shipped, tmp_path, site=False)
    assert code == 1
    assert complained.count("\n") == 1
    assert "pip_packages=['cloudpickle']" in complained

    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ValidationError, match=r"pip install 'basilica-train\[cloudpickle\]'"):
        ship(helper, args=(1,), by="pickle")


def test_another_python_is_told_which_one_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(version_info=SimpleNamespace(major=3, minor=99), modules=sys.modules)
    monkeypatch.setattr(pickled, "sys", other)
    shipped = ship(helper, args=(1,), by="pickle")
    monkeypatch.undo()
    code, _, complained = rank(shipped, tmp_path)
    assert code == 1
    assert complained.count("\n") == 1
    assert "helper was pickled by Python 3.99" in complained
    assert "use an image with Python 3.99, or deploy without ship='pickle'" in complained


def test_a_module_of_the_callers_own_travels_with_its_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    text = """
        import math

        class Thing:
            side = 2

        def area(scale):
            return math.floor(scale * Thing.side ** 2)
    """
    (folder / "parcel_of_mine.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(folder))
    import parcel_of_mine  # type: ignore[import-not-found]

    try:
        assert answer(tmp_path, parcel_of_mine.area, 2.6) == 10
    finally:
        del sys.modules["parcel_of_mine"]
