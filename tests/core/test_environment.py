"""The names of our environment variables stand in one module, and the values of a rank are one rule."""

import re
from pathlib import Path

import pytest

import basilica
from basilica.core import environment as env
from basilica.core.spec import DeploymentSpec, Exec
from basilica.core.world import WorldSize

PACKAGE = Path(basilica.__file__).parent
ALONE = (  # they travel without the package, or are imported by programs that need no more of it
    "mesh.py",
    "reports/writer.py",
    "progress/notices.py",
    "progress/progress.py",
    "shipping/bootstrap.py",
    "rendezvous/torch_handler.py",
    "rendezvous/torch_agent.py",
    "rendezvous/torch_budget.py",
)
NAMES = {value for name, value in vars(env).items() if name.isupper() and isinstance(value, str)}
VARIABLE = re.compile(r"""["'$ ](BASILICA_[A-Z_]+[A-Z])(?=["'=$}/ ])""")
ERROR_CODES = re.compile(r"BASILICA_API_(?!URL|TOKEN|KEY)")


def code_of(path: Path) -> str:
    """The text without docstrings, help texts and comments: those are for people."""
    without_docs = re.sub(r'"""(?s:.*?)"""', "", path.read_text(encoding="utf-8"))
    return re.sub(r"#.*", "", without_docs)


def spelled_in(path: Path) -> set[str]:
    return {name for name in VARIABLE.findall(code_of(path)) if not ERROR_CODES.match(name)}


@pytest.mark.parametrize("file", ALONE)
def test_files_that_travel_alone_spell_names_that_exist(file: str) -> None:
    found = spelled_in(PACKAGE / file)
    assert found
    assert found <= NAMES


def test_no_other_module_spells_the_name_of_a_variable_in_its_code() -> None:
    texts_for_people = {"cli", "client"}  # their messages name variables to set
    spelled = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).as_posix() not in (*ALONE, "core/environment.py")
        and path.relative_to(PACKAGE).parts[0] not in ("testing", *texts_for_people)
        for name in re.findall(r"""["'](BASILICA_[A-Z_]+)["'=]""", code_of(path))
        if not ERROR_CODES.match(name)
    }
    assert spelled == set()


SPEC = DeploymentSpec(
    name="train",
    program=Exec(("true",)),
    world=WorldSize(min=1, target=2, max=4),
    nccl_env={"A": "nccl", "NCCL_DEBUG": "INFO"},
    env={"A": "env", "B": "env", "MASTER_PORT": "1", "PYTHONUNBUFFERED": "0", env.RANK: "9", env.NAME: "mine"},
    secrets={"B": "secret", "HOME": "/secret"},
)


def shared() -> dict[str, str]:
    return env.run_environment(
        SPEC,
        "train-1",
        machine={"HOME": "/root", "PYTHONUNBUFFERED": "x", "PATH": "/bin"},
        user=env.user_environment(SPEC),
        master=("10.0.0.1", 29500),
        rendezvous="10.0.0.2:2379",
        checkpoints="/checkpoints",
        snapshots="/snapshots",
    )


def test_secrets_win_over_env_and_env_over_nccl() -> None:
    assert (shared()["A"], shared()["B"], shared()["NCCL_DEBUG"]) == ("env", "secret", "INFO")


def test_users_win_over_defaults_and_the_machine_and_the_contract_wins_over_users() -> None:
    found = shared()
    assert (found["PATH"], found["HOME"]) == ("/bin", "/secret")
    assert (found["PYTHONUNBUFFERED"], found["MASTER_PORT"], found["MASTER_ADDR"]) == ("0", "1", "10.0.0.1")
    assert found[env.NAME] == "train"
    mine = found | env.attempt_environment(1, 3, 2, result_file="/r", error_file="/e")
    assert (mine[env.RANK], mine["RANK"], mine["WORLD_SIZE"], mine[env.ATTEMPT]) == ("1", "1", "2", "3")
    assert (mine[env.RESULT_FILE], mine[env.TORCH_ERROR_FILE]) == ("/r", "/e")
