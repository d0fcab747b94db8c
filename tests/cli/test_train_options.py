"""What people write on the command line, and what the SDK gets."""

from contextlib import suppress
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from basilica.cli.train import options
from basilica.core.world import WorldSize


@pytest.mark.parametrize(("text", "size"), [("1", (1, 1, 1)), ("8", (8, 8, 8)), ("2:4:8", (2, 4, 8))])
def test_a_world_size_is_one_number_or_three(text: str, size: tuple[int, int, int]) -> None:
    assert options.world_size(text) == WorldSize(*size)


@pytest.mark.parametrize("text", ["", "0", "-1", "2:4", "4:2:8", "2:9:8", "a", "1:2:3:4", "1.5", "²", "٣", "99999999"])
def test_another_world_size_is_bad_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        options.world_size(text)


@given(st.text())
def test_no_text_makes_the_world_size_crash(text: str) -> None:
    with suppress(typer.BadParameter):
        options.world_size(text)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (["--bench", "x.py"], ["--bench=on-start", "x.py"]),
        (["--bench"], ["--bench=on-start"]),
        (["--bench", "off"], ["--bench", "off"]),
        (["--bench", "on-start", "n"], ["--bench", "on-start", "n"]),
        (["--bench=off"], ["--bench=off"]),
        (["--no-bench", "n"], ["--bench=off", "n"]),
    ],
)
def test_bench_with_and_without_a_value(written: list[str], meant: list[str]) -> None:
    assert options.plain_bench(written) == meant


def test_what_comes_after_two_dashes_is_left_alone() -> None:
    assert options.split_rest(["a", "--", "b", "--", "--bench"]) == (["a"], ["b", "--", "--bench"])
    assert options.split_rest(["a"]) == (["a"], None)
    assert options.split_rest(["--"]) == ([], [])


def test_a_command_or_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    path = str(script)
    program = options.program
    assert program([], ["python", "t.py"], None) == options.Program(None, ["python", "t.py"], None, [])
    assert program(["n"], ["t"], None) == options.Program("n", ["t"], None, [])
    assert program([path], None, None) == options.Program(None, None, script, [])
    assert program(["n", path], ["--x"], None) == options.Program("n", None, script, ["--x"])
    assert program(["n"], None, "echo $X") == options.Program("n", "echo $X", None, [])


@pytest.mark.parametrize(
    ("words", "rest", "shell"),
    [
        ([], None, None),
        (["n"], None, None),
        (["n"], [], None),
        (["n", "python"], None, None),
        (["n", "python", "x"], ["y"], None),
        (["n"], ["x"], "y"),
        (["n", "no-such-file.py"], None, None),
        (["n", "train.py"], None, "y"),
    ],
)
def test_nothing_or_two_things_to_run_is_bad_usage(words: list[str], rest: list[str] | None, shell: str | None) -> None:
    with pytest.raises(typer.BadParameter):
        options.program(words, rest, shell)


def test_variables_are_given_or_taken_from_here() -> None:
    here = {"TOKEN": "s3cret"}
    found = options.variables(["A=1", "B=", "C=x=y", "TOKEN"], "--env", here=here)
    assert found == {"A": "1", "B": "", "C": "x=y", "TOKEN": "s3cret"}


@pytest.mark.parametrize("item", ["", "=x", "A B=1", "MISSING", "1A=secret", "-x"])
def test_another_variable_is_bad_usage_and_its_value_is_not_told(item: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        options.variables([item], "--secret", here={})
    assert "secret" not in str(caught.value)


def test_an_env_file(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("# comment\n\nA=1\nexport B='two words'\nC=\"3\"\nD=\nE=a=b#c\n")
    assert options.env_file(file) == {"A": "1", "B": "two words", "C": "3", "D": "", "E": "a=b#c"}
    file.write_text("A=1\nwhat is this\n")
    with pytest.raises(typer.BadParameter, match="line 2"):
        options.env_file(file)
    with pytest.raises(typer.BadParameter, match="cannot read"):
        options.env_file(tmp_path / "missing")
    file.write_bytes(b"\xff=\n")
    with pytest.raises(typer.BadParameter, match="cannot read"):
        options.env_file(file)


def test_names_are_separated_by_commas_or_repeated() -> None:
    assert options.names(["a,b", "c", ",d,"]) == ("a", "b", "c", "d")
