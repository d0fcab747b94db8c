"""What a function takes along, and what a rank makes of it: run for real, in a Python that has nothing of ours."""

import base64
import functools
import importlib.util
import json
import linecache
import os
import subprocess
import sys
import textwrap
import threading
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from basilica.core.errors import ValidationError
from basilica.shipping.capture import capture
from basilica.shipping.literals import literal
from basilica.shipping.source import SOURCE_VARIABLE, Shipped, ship, with_packages

Load = Callable[[str], ModuleType]


@dataclass
class Rank:
    """A process that executes what was shipped, in an empty directory."""

    directory: Path
    env: dict[str, str] = field(default_factory=dict)

    def run(self, shipped: Shipped, *args: str, isolated: bool = True) -> subprocess.CompletedProcess[str]:
        _, *rest = shipped.argv
        environment = {"PATH": os.environ["PATH"], "BASILICA_RESULT_FILE": str(self.result_file)}
        return subprocess.run(
            [sys.executable, *(["-I"] if isolated else []), *rest, *args],
            env=environment | self.env | shipped.env,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def result_file(self) -> Path:
        return self.directory / "results" / "0.json"

    def result(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        done = self.run(ship(source, args=args, kwargs=kwargs))
        assert done.returncode == 0, done.stderr
        return json.loads(self.result_file.read_text())


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    directory = tmp_path / "rank"
    directory.mkdir()
    return Rank(directory)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """A module of one's own, from its text."""

    def load(text: str, name: str = "train") -> ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def text_of(function: Callable[..., Any]) -> str:
    """The lines that travel, without the empty ones."""
    return "\n".join(line for line in capture(function).text.splitlines() if line.strip())


# ---- what a function takes along ------------------------------------------------------------------------------------


def test_a_function_takes_the_imports_that_it_uses_and_no_others(rank: Rank, load: Load) -> None:
    module = load(
        """
        import os, sys
        import json as j
        import socket
        from pathlib import Path, PurePath
        from collections import OrderedDict as Ordered, deque

        def f():
            return [os.sep, j.dumps(1), Path("/a/b").name, list(Ordered(a=1))]
        """
    )
    assert rank.result(module.f) == ["/", "1", "b", ["a"]]
    assert text_of(module.f).splitlines()[:4] == [
        "import os",
        "import json as j",
        "from pathlib import Path",
        "from collections import OrderedDict as Ordered",
    ]


def test_imports_used_in_nested_functions_annotations_defaults_and_decorators_come_too(rank: Rank, load: Load) -> None:
    module = load(
        """
        import functools
        import math
        import string
        from pathlib import Path
        from collections.abc import Sequence
        import socket

        @functools.cache
        def f(x: Sequence[int] = (), *, y: int = math.floor(2.5)) -> Path:
            def inner():
                return [c for c in string.digits]
            return len(inner()) + y
        """
    )
    assert rank.result(module.f) == 12
    assert "socket" not in text_of(module.f)


def test_functions_classes_and_constants_of_the_module_come_transitively(rank: Rank, load: Load) -> None:
    module = load(
        """
        import dataclasses
        import json

        SCALE = 3
        UNUSED = object()

        class Base:
            def double(self):
                return 2 * helper()

        @dataclasses.dataclass
        class Config(Base):
            x: int = SCALE

        def helper():
            return SCALE

        def unused():
            return json

        def f():
            return Config().double() + Config().x
        """
    )
    assert rank.result(module.f) == 9
    assert "unused" not in text_of(module.f).lower()
    assert "json" not in text_of(module.f)


def test_a_literal_constant_travels_by_the_value_that_it_has_now(rank: Rank, load: Load) -> None:
    module = load(
        "A = 1\nB: dict[str, tuple[int, ...]] = {'a': (1, 2)}\ndef f():\n    return [A, B['a'] == (1, 2, 3)]\n"
    )
    module.A = -5  # type: ignore[attr-defined]
    module.B["a"] = (1, 2, 3)
    assert rank.result(module.f) == [-5, True]


def test_a_computed_constant_is_computed_again_on_the_rank(rank: Rank, load: Load) -> None:
    module = load("import os\nRANK = int(os.environ.get('RANK', '0'))\ndef f():\n    return RANK\n")
    rank.env["RANK"] = "7"
    assert rank.result(module.f) == 7


def test_assignments_that_build_on_each_other_all_come(rank: Rank, load: Load) -> None:
    module = load("import os\nx = len('abc')\nx += 1\na, b = 1, 2\ndef f():\n    return [x, b]\n")
    assert rank.result(module.f) == [4, 2]


def test_a_guarded_import_comes_whole(rank: Rank, load: Load) -> None:
    module = load(
        """
        from typing import TYPE_CHECKING
        try:
            import no_such_module_here
        except ImportError:
            no_such_module_here = None
        if TYPE_CHECKING:
            from nowhere import Thing

        def f(x: "Thing" = None):
            return no_such_module_here is None
        """
    )
    assert rank.result(module.f) is True


def test_with_lazy_annotations_those_of_functions_stay_behind(rank: Rank, load: Load) -> None:
    module = load(
        """
        from __future__ import annotations
        import decimal
        import fractions
        import dataclasses

        @dataclasses.dataclass
        class C:
            x: fractions.Fraction = 1

        def f(x: decimal.Decimal = None) -> decimal.Decimal:
            y: decimal.Decimal = 2
            return C().x + y
        """
    )
    assert rank.result(module.f) == 3
    assert "import decimal" not in text_of(module.f)
    assert "import fractions" in text_of(module.f)


def test_submodules_that_are_used_are_imported_by_name(rank: Rank, load: Load) -> None:
    module = load(
        """
        import xml.etree.ElementTree
        import xml.dom.minidom
        import os.path

        def f():
            return [xml.etree.ElementTree.fromstring("<a/>").tag, os.path.basename("/a/b")]
        """
    )
    assert rank.result(module.f) == ["a", "b"]
    assert "xml.dom" not in text_of(module.f)


def test_a_star_import_is_followed(rank: Rank, load: Load) -> None:
    module = load("from os.path import *\nfrom string import *\ndef f():\n    return basename('/a/b') + digits\n")
    assert rank.result(module.f) == "b0123456789"


def test_relative_imports_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: Rank) -> None:
    package = tmp_path / "parcel"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tools.py").write_text("def tool():\n    return 5\n")
    (package / "work.py").write_text(
        "from .tools import tool\nfrom . import tools as t\ndef f():\n    return tool()+t.tool()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    work = importlib.import_module("parcel.work")
    assert "from parcel.tools import tool" in text_of(work.f)
    done = rank.run(ship(work.f))  # the caller's first place for modules is given to the rank
    assert (done.returncode, rank.result_file.read_text()) == (0, "10"), done.stderr


def test_what_stands_under_the_main_guard_never_runs_on_a_rank(rank: Rank, load: Load) -> None:
    module = load(
        """
        def f():
            return LR

        if __name__ == "__main__":
            raise SystemExit("the rank ran the script")
            LR = 0
        """
    )
    module.LR = 0.25  # type: ignore[attr-defined]
    assert rank.result(module.f) == 0.25
    module.LR = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ValidationError, match=r"uses the global 'LR' \(a lock\), which cannot travel"):
        ship(module.f)


def test_a_variable_that_is_made_by_the_function_itself_is_refused(load: Load) -> None:
    module = load("def f():\n    return first\nfirst = None\nfirst = f()\n")
    with pytest.raises(ValidationError, match="uses 'first', which is made by calling it"):
        ship(module.f)


def test_two_statements_on_a_line_are_told_apart(rank: Rank, load: Load) -> None:
    module = load("import os; import sys; X = len('ab'); Y = object()\ndef f(): return [os.sep, X]\n")
    assert rank.result(module.f) == ["/", 2]
    assert "sys" not in text_of(module.f)


def test_our_own_decorator_stays_behind_and_others_come(rank: Rank, load: Load) -> None:
    module = load(
        """
        import functools
        import basilica.client.decorator as ours
        from basilica.core.world import WorldSize

        def twice(g):
            @functools.wraps(g)
            def wrapper(*args):
                return 2 * g(*args)
            return wrapper

        @ours.distributed(
            world_size=WorldSize(1, 1, 1),
        )
        @twice
        def f(x):
            return x
        """
    )
    assert "basilica" not in text_of(module.f)
    assert "WorldSize" not in text_of(module.f)
    assert rank.result(module.f, 4) == 8


def test_lines_stay_where_they_were_so_that_tracebacks_fit_the_file(rank: Rank, load: Load) -> None:
    module = load(
        '''
        """A docstring."""
        import json

        UNUSED = """
        many
        lines
        """

        def g():
            raise KeyError("here")

        def f():
            return json and g()
        '''
    )
    done = rank.run(ship(module.f))
    assert done.returncode == 1
    lines = (Path(module.__file__ or "").read_text()).splitlines()
    for text in ('raise KeyError("here")', "return json and g()"):
        assert f'train.py", line {lines.index("    " + text) + 1}' in done.stderr
        assert f"    {text}\n" in done.stderr
    assert done.stderr.endswith("KeyError: 'here'\n")
    assert "<basilica>" not in done.stderr


# ---- closures -------------------------------------------------------------------------------------------------------


def test_plain_data_and_modules_in_a_closure_travel(rank: Rank) -> None:
    config: dict[str, Any] = {"lr": 0.1, "layers": (1, 2), "name": "ü", "nothing": None, "infinite": float("inf")}
    import textwrap as wrapping

    def f() -> Any:
        text = """
no indentation
        some"""
        return [config["lr"], config["layers"] == (1, 2), wrapping.dedent("  x"), len(text), config["infinite"] > 9]

    assert rank.result(f) == [0.1, True, "x", 28, True]


def test_a_local_function_can_use_another_and_itself(rank: Rank) -> None:
    base = 2

    def helper(n: int) -> int:
        return base * n

    def f(n: int) -> int:
        return helper(n) + (f(n - 1) if n else 0)

    assert rank.result(f, 3) == 12


def test_a_closure_over_what_cannot_travel_is_refused_with_its_name() -> None:
    lock = threading.Lock()

    def f() -> object:
        return lock

    with pytest.raises(ValidationError) as refused:
        ship(f)
    problem = "closes over 'lock' (a lock), which cannot travel; pass it as an argument or make it in the function"
    assert refused.value.args == ("source", "f", f"{problem}, or deploy with ship='pickle' if it can be pickled")


def test_a_closure_without_a_value_is_refused() -> None:
    def f() -> object:
        return later

    with pytest.raises(ValidationError, match="closes over 'later', which has no value yet"):
        ship(f)
    later = 1


def test_two_variables_of_one_name_are_refused(load: Load) -> None:
    module = load(
        """
        x = 1
        def helper():
            return x
        def make():
            x = 2
            def f():
                return x + helper()
            return f
        """
    )
    with pytest.raises(ValidationError, match="uses two variables called 'x'; rename one"):
        ship(module.make())


# ---- what is no such function ---------------------------------------------------------------------------------------


class Thing:
    def method(self) -> None: ...

    @staticmethod
    def static() -> None: ...


def generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (lambda: 1, "is a lambda; give it a name with `def`"),
        (len, "is a builtin, not a function"),
        (Thing, "is a class, not a function"),
        (Thing().method, "is a method of an object"),
        (Thing.static, "is a method of a class"),
        (generator, "is a generator"),
        (functools.partial(print, 1), "is a partial, not a function"),
    ],
)
def test_what_cannot_be_called_by_name_is_refused(source: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ship(source)


def test_a_function_without_source_is_refused() -> None:
    namespace: dict[str, Any] = {}
    exec("def f():\n    return 1\n", namespace)
    with pytest.raises(ValidationError, match="its source cannot be found"):
        ship(namespace["f"])


def test_a_file_that_changed_since_it_was_loaded_is_refused(load: Load) -> None:
    module = load("def f():\n    return 1\n")
    Path(module.__file__ or "").write_text("x = 1\n\n\ndef f():\n    return 2\n")
    linecache.checkcache()
    with pytest.raises(ValidationError, match="has changed since it was loaded"):
        ship(module.f)


def test_functions_typed_into_a_notebook_travel_with_what_other_cells_define(rank: Rank) -> None:
    cells = [
        "",
        "import json as j\nfrom math import floor",
        "%matplotlib inline",
        "scale = 2",
        "def helper(x):\n    return floor(x * scale)",
        "for lr in (1, 2): pass",
        "def f(x):\n    return [j.loads('1'), helper(x), lr]",
    ]
    namespace: dict[str, Any] = {"__name__": "__main__", "In": cells, "get_ipython": lambda: None}
    for number, cell in enumerate(cells):
        if not cell.startswith("%"):
            file = f"<ipython-input-{number}-abc>"
            linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
            exec(compile(cell, file, "exec"), namespace)
    assert rank.result(namespace["f"], 2.25) == [1, 4, 2]


# ---- arguments and results ------------------------------------------------------------------------------------------


def echo(*args: Any, **kwargs: Any) -> Any:
    return [repr(args), repr(kwargs)]


def takes(a: Any, b: Any = None) -> None: ...


def test_arguments_arrive_as_they_were_given(rank: Rank) -> None:
    args = (1, (2, [3.5, None]), {4: "ü", "b": b"\0"}, {5}, float("-inf"), "'\"\n\\")
    assert rank.result(echo, *args, k=True) == [repr(args), "{'k': True}"]


def test_an_argument_that_cannot_travel_is_refused_with_its_name() -> None:
    with pytest.raises(ValidationError, match=r"source_args: the argument 'a' \(a PosixPath\) cannot travel"):
        ship(takes, args=(Path("/"),))
    with pytest.raises(ValidationError, match=r"source_kwargs: the argument 'b' \(an object\) cannot travel"):
        ship(takes, args=(1,), kwargs={"b": object()})
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValidationError, match=r"the argument 'a' \(a list\) cannot travel"):
        ship(takes, args=(circle,))


def test_arguments_that_do_not_fit_are_refused_at_once() -> None:
    with pytest.raises(ValidationError, match="takes: missing a required argument: 'a'"):
        ship(takes)
    with pytest.raises(ValidationError, match="only a function takes them"):
        ship("print(1)", args=(1,))


def returns(kind: str) -> Any:
    class Scalar:
        def item(self) -> float:
            return 1.5

    class Array:
        def tolist(self) -> list[Any]:
            return [1, Scalar()]

    return {
        "plain": {"a": (1, None, True, "ü"), 3: 1.5},
        "array": {"x": Array()},
        "nan": float("nan"),
        "object": {"a": [1, {"b": object()}]},
        "key": {(1, 2): 3},
        "large": "x" * (9 << 20),
        "nothing": None,
    }[kind]


def test_what_a_function_returns_comes_back_as_json(rank: Rank) -> None:
    assert rank.result(returns, "plain") == {"a": [1, None, True, "ü"], "3": 1.5}
    assert rank.result(returns, "array") == {"x": [1, 1.5]}
    assert rank.result(returns, "nan") != rank.result(returns, "nan")
    assert rank.result(returns, "nothing") is None
    assert [path.name for path in rank.result_file.parent.glob("*.json")] == ["0.json"]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("object", "TypeError: returns()['a'][1]['b'] is of type object, which is no JSON"),
        ("key", "TypeError: returns() has a key of type tuple, which is no JSON"),
        ("large", "ValueError: returns() returned 9437186 bytes of JSON, more than 8388608"),
    ],
)
def test_a_result_that_is_no_json_fails_the_rank_and_names_the_type(rank: Rank, kind: str, problem: str) -> None:
    done = rank.run(ship(returns, args=(kind,)))
    assert done.returncode == 1
    assert done.stderr.startswith(problem)  # nothing of ours around it
    assert not rank.result_file.exists()


def test_numpy_and_torch_results_become_lists_and_numbers(rank: Rank) -> None:
    np = pytest.importorskip("numpy")

    def f() -> Any:
        return {"mean": np.float32(0.5), "all": np.arange(4).reshape(2, 2), "n": np.int64(3)}

    assert rank.result(f) == {"mean": 0.5, "all": [[0, 1], [2, 3]], "n": 3}


async def later() -> str:
    import asyncio

    await asyncio.sleep(0)
    return "later"


def test_a_coroutine_function_is_run_in_a_loop(rank: Rank) -> None:
    assert rank.result(later) == "later"


def leaves(code: Any) -> None:
    sys.exit(code)


@pytest.mark.parametrize(("given", "code"), [(0, 0), (3, 3), (None, 0), ("sorry", 1)])
def test_an_exit_is_honoured(rank: Rank, given: Any, code: int) -> None:
    done = rank.run(ship(leaves, args=(given,)))
    assert (done.returncode, rank.result_file.exists()) == (code, False)
    assert done.stderr == ("sorry\n" if given == "sorry" else "")


def test_the_result_of_an_earlier_attempt_does_not_stand_for_a_later_one(rank: Rank) -> None:
    rank.result(later)
    rank.run(ship(leaves, args=(3,)))
    assert not rank.result_file.exists()


def spawns() -> Any:
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(square, [3])


def square(x: int) -> int:
    return x * x


def test_processes_can_be_spawned_from_a_shipped_function(rank: Rank) -> None:
    assert rank.result(spawns) == [9]


def inherits() -> Any:
    return [os.environ.get("BASILICA_SOURCE"), __name__, os.path.exists(__file__), sys.argv[1:]]


def test_what_a_shipped_function_finds_around_it(rank: Rank) -> None:
    done = rank.run(ship(inherits), "--epochs", "3")
    assert done.returncode == 0, done.stderr
    assert json.loads(rank.result_file.read_text()) == [None, "__main__", True, ["--epochs", "3"]]


def test_without_a_place_for_results_it_runs_all_the_same(tmp_path: Path) -> None:
    shipped = ship(later)
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), **shipped.env}
    done = subprocess.run([sys.executable, "-I", *shipped.argv[1:]], env=env, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


# ---- scripts --------------------------------------------------------------------------------------------------------


def test_a_path_is_executed_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    monkeypatch.chdir(tmp_path)
    assert ship("train.py", python="/p") == Shipped(["/p", "-u", str(tmp_path / "train.py")])
    assert ship(Path("train.py"), python="/p") == ship("train.py", python="/p")


def test_for_a_remote_server_the_text_of_the_script_travels(rank: Rank, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nif __name__ == '__main__':\n    print(__file__, sys.argv[1:])\n    raise OSError\n")
    done = rank.run(ship(script, remote=True), "-x")
    assert done.stdout.endswith("train.py ['-x']\n")
    assert 'train.py", line 4, in <module>\n    raise OSError\n' in done.stderr
    assert done.returncode == 1


def test_a_script_in_the_shipped_directory_is_executed_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    script = tmp_path / "a" / "train.py"
    script.touch()
    assert ship(script, remote=True, workdir=tmp_path).argv == ["python3", "-u", "a/train.py"]
    assert ship(script, remote=True, workdir=tmp_path / "other").argv[:3] == ["python3", "-u", "-c"]


def test_text_is_run_as_a_script(rank: Rank) -> None:
    done = rank.run(ship("import sys\nprint(__name__, sys.argv[1:])\n"), "a b")
    assert (done.stdout, done.returncode) == ("__main__ ['a b']\n", 0)
    assert rank.run(ship("print('one line')")).stdout == "one line\n"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("trian.py", "there is no such file"),
        (Path("nowhere"), "there is no such file"),
        ("trian --epochs 3", "is neither an existing file nor Python source"),
        ("  ", "there is nothing to run"),
        (Path("/"), "is not a file; ship a directory with workdir="),
        (5, "is an int; give a function, the path of a script, or its text"),
    ],
)
def test_what_is_neither_a_file_nor_source_is_refused(source: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ship(source)


def test_source_that_is_too_long_is_refused_with_the_way_out() -> None:
    text = f"x = {os.urandom(100_000).hex()!r}\nprint(x)"
    with pytest.raises(ValidationError, match="ship files with workdir="):
        ship(text)


def test_what_travels_fits_into_a_variable() -> None:
    text = f"x = {os.urandom(70_000).hex()!r}\nprint(len(x))"
    shipped = ship(text)
    assert 90_000 < len(shipped.env[SOURCE_VARIABLE]) < (128 << 10) - len(SOURCE_VARIABLE) - 2


# ---- launchers and packages -----------------------------------------------------------------------------------------


def payload(shipped: Shipped) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(shipped.env[SOURCE_VARIABLE])))
    return found


def test_torchrun_gets_its_options_before_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    shipped = ship(script, launcher="torchrun", python="/p")
    assert shipped.resize == "join"
    assert shipped.argv[:3] == ["/p", "-u", "-c"]
    assert payload(shipped)["script"] == str(script)
    assert payload(shipped)["torchrun"] == [
        "--nnodes=$BASILICA_WORLD_MIN:$BASILICA_WORLD_MAX",
        "--rdzv-backend=basilica",
        "--rdzv-endpoint=$BASILICA_RDZV_ENDPOINT",
        "--rdzv-id=$BASILICA_RDZV_ID",
        "--nproc-per-node=$BASILICA_GPUS_PER_POD",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "--rdzv-conf=timeout=900,last_call_timeout=30",
    ]
    assert ship(script).resize == "restart"
    for launcher in ("mpirun", "python -X dev", "torchrun '", ""):
        with pytest.raises(ValidationError, match="must be 'python' or 'torchrun'"):
            ship(script, launcher=launcher)


def test_each_rendezvous_backend_has_its_own_options(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    c10d = ship(script, launcher="torchrun", rendezvous_backend="c10d")
    assert c10d.resize == "join"
    assert "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT" in payload(c10d)["torchrun"]
    assert "--rdzv-conf=join_timeout=900,last_call_timeout=30" in payload(c10d)["torchrun"]
    static = ship(script, launcher="torchrun", rendezvous_backend="static")
    assert static.resize == "restart"  # a fixed number of ranks cannot be joined
    assert payload(static)["torchrun"][:5] == [
        "--nnodes=$WORLD_SIZE",
        "--rdzv-backend=static",
        "--node-rank=$BASILICA_RANK",
        "--master-addr=$MASTER_ADDR",
        "--master-port=$MASTER_PORT",
    ]
    with pytest.raises(ValidationError, match="must be 'etcd-v2', 'c10d' or 'static'"):
        ship(script, launcher="torchrun", rendezvous_backend="etcd")


@pytest.mark.parametrize("own", ["--rdzv-conf=timeout=7", "--rdzv_conf timeout=7"])
def test_torchrun_takes_the_users_options_last_and_one_rdzv_conf(tmp_path: Path, own: str) -> None:
    script = tmp_path / "train.py"
    script.touch()
    options = payload(ship(script, launcher=f"torchrun --max-restarts=0 {own}"))["torchrun"]
    assert options[-1 - len(own.split()) :] == ["--max-restarts=0", *own.split()]
    assert sum("conf" in option for option in options) == 1


FAKE_TORCHRUN = """
import os, subprocess, sys
options = [a for a in sys.argv[1:] if a.startswith("--")]
script, *rest = sys.argv[1 + sum(a.startswith("--n") or a.startswith("--r") or a.startswith("--m") for a in sys.argv):]
print(options[:4], flush=True)
for local in range(2):
    code = subprocess.call([sys.executable, "-u", script, *rest], env={**os.environ, "LOCAL_RANK": str(local)})
    if code:
        sys.exit(code)
"""


def local_rank() -> Any:
    print("worker", os.environ["LOCAL_RANK"], sys.argv[1:])
    return int(os.environ["LOCAL_RANK"])


def test_a_function_under_torchrun_is_run_by_its_workers_and_the_first_one_answers(rank: Rank) -> None:
    package = rank.directory / "torch" / "distributed"
    package.mkdir(parents=True)
    for place in (package, package.parent):
        (place / "__init__.py").touch()
    (package / "run.py").write_text(FAKE_TORCHRUN)
    rank.env = {
        "PYTHONPATH": str(rank.directory),
        "BASILICA_WORLD_MIN": "1",
        "BASILICA_WORLD_MAX": "4",
        "BASILICA_GPUS_PER_POD": "2",
        "BASILICA_RDZV_ENDPOINT": "127.0.0.1:29400",
        "BASILICA_RDZV_ID": "the-run",
    }
    done = rank.run(ship(local_rank, launcher="torchrun"), "--x=1", isolated=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['--nnodes=1:4', '--rdzv-backend=basilica', '--rdzv-endpoint=127.0.0.1:29400', '--rdzv-id=the-run']",
        "worker 0 ['--x=1']",
        "worker 1 ['--x=1']",
    ]
    assert rank.result_file.read_text() == "0"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package that exists nowhere else."""
    path = tmp_path / "basilica_parcel-1.0-py3-none-any.whl"
    info = "basilica_parcel-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("basilica_parcel.py", "VALUE = 42\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: basilica-parcel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def uses_parcel() -> Any:
    import subprocess

    import basilica_parcel  # type: ignore[import-not-found]

    child = [sys.executable, "-c", "import basilica_parcel; print(basilica_parcel.VALUE)"]
    return [basilica_parcel.VALUE, subprocess.check_output(child, text=True)]


def test_packages_are_installed_for_the_rank_alone(rank: Rank, wheel: Path, tmp_path: Path) -> None:
    shipped = ship(uses_parcel, pip_packages=[str(wheel)])
    for _ in range(2):  # a later attempt finds what an earlier one installed
        done = rank.run(shipped, isolated=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(rank.result_file.read_text()) == [42, "42\n"]
        wheel.unlink(missing_ok=True)
    assert importlib.util.find_spec("basilica_parcel") is None


def test_packages_are_there_for_a_script_and_for_a_command(rank: Rank, wheel: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, basilica_parcel\nprint(basilica_parcel.VALUE, sys.argv[1:])\n")
    done = rank.run(ship(script, pip_packages=[str(wheel)]), "a", isolated=False)
    assert (done.stdout, done.stderr) == ("42 ['a']\n", "")
    command = ["sh", "-c", 'echo "$PYTHONPATH" "$@"', "sh"]
    done = rank.run(with_packages(command, [str(wheel)]), "b", isolated=False)
    assert done.stdout.endswith("packages b\n")


def test_packages_that_cannot_be_installed_end_the_rank_with_a_sentence(rank: Rank) -> None:
    done = rank.run(ship(later, pip_packages=["/nowhere/at-all.whl"]), isolated=False)
    assert done.returncode == 1
    assert done.stderr.endswith("basilica: could not install /nowhere/at-all.whl: pip exited with code 1\n")
    with pytest.raises(ValidationError, match="must be a list of what pip takes"):
        ship(later, pip_packages="einops")


# ---- literals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -1,
        1.5,
        float("inf"),
        "ü\n'",
        b"\0",
        (),
        (1,),
        [1, [2]],
        {1: {2}},
        frozenset({3}),
        set(),
        1j,
    ],
)
def test_a_literal_makes_an_equal_value(value: object) -> None:
    source = literal(value)
    assert source is not None
    made = eval(source)
    assert (made, type(made)) == (value, type(value))


def test_no_literal_stands_for_an_object_or_a_subclass() -> None:
    class Number(int):
        pass

    assert [literal(v) for v in (object(), Number(1), [object()], {"a": Path("/")}, threading)] == [None] * 5


def test_a_number_of_thousands_of_digits_is_a_literal() -> None:
    assert eval(literal(10**5000) or "") == 10**5000
