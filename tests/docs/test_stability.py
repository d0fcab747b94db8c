"""What the page on stability lists is what there is: names, variables, and the tests that it points to."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from basilica import exceptions
from basilica.core import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/stability.md").read_text()
RANK_PAGE = (ROOT / "docs/reference/environment.md").read_text()
VARIABLE = re.compile(
    r"(?<![A-Z_])BASILICA_(?!API_[A-Z_]*(?:ERROR|REQUEST|FOUND|LIMIT|MISSING|UNAVAILABLE)\b)[A-Z_]*[A-Z]\b"
)

# Variables between our own processes. A new one belongs here, or on a page for users.
INTERNAL = """
BASILICA_ARCHIVE BASILICA_ARCHIVE_PARTS BASILICA_ARCHIVE_SENT BASILICA_ARCHIVE_UNPACKED BASILICA_ARCHIVE_WORKDIR
BASILICA_BENCH_DIR BASILICA_BENCH_TOKEN BASILICA_DRIVEN BASILICA_EXEC BASILICA_FENCE BASILICA_GRACE_SECONDS
BASILICA_MEMORY_EVENTS BASILICA_NOTICE_SECONDS BASILICA_NOTICE_SIGNAL BASILICA_POD_UID
BASILICA_RANK_ENV BASILICA_SCRATCH BASILICA_SOURCE
"""
NAMES = {
    "basilica.diloco": """
        ArrayDiLoCo BarrierTimeout CorruptPart DiLoCo ObjectStoreAllReduce RoundConflict RoundError RoundGone RoundStats
        on_sigterm
    """,
    "basilica.executors": """
        BasilicaExecutor EKSExecutor LocalProcessExecutor ModalSpawnExecutor ReplicaHandle ReplicaResult
        SageMakerExecutor ServerlessExecutor gather_logs live_table
    """,
    "basilica.testing": "ExecutorContract KeysContract RuntimeContract StoreContract",
}


def test_every_variable_is_documented_or_our_own() -> None:
    in_code = {name for path in (ROOT / "src").rglob("*.py") for name in VARIABLE.findall(path.read_text())}
    public = set(VARIABLE.findall(PAGE)) | set(VARIABLE.findall(RANK_PAGE))
    assert in_code - public - set(INTERNAL.split()) == set()
    assert public - in_code == set()
    assert not public & set(INTERNAL.split())
    assert set(INTERNAL.split()) <= in_code


def test_the_tests_that_pin_it_are_there() -> None:
    named = set(re.findall(r"`(tests/[\w/.]+)`", PAGE))
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("module", NAMES)
def test_the_names_of_public_modules(module: str) -> None:
    assert module in PAGE
    assert sorted(import_module(module).__all__) == NAMES[module].split()


def test_the_exceptions_of_the_published_client_are_ours() -> None:
    for name in exceptions.__all__:
        assert getattr(exceptions, name) is getattr(errors, name)


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs/adr/README.md").read_text()
    titles = {p.name: p.read_text().splitlines()[0].removeprefix("# ") for p in (ROOT / "docs/adr").glob("[0-9]*.md")}
    assert titles
    assert {name: title for name, title in titles.items() if f"[{title}]({name})" not in index} == {}
    assert sorted(titles) == sorted(re.findall(r"\((\d+-[\w-]+\.md)\)", index))
