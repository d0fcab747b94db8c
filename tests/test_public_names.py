"""What others rely on, pinned: a change of these lists is a change for users and belongs in the changelog."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import typer.main

import basilica
from basilica.cli.main import app
from tests.support.world import World

ROUTES = [
    "DELETE /deployments/{name}",
    "DELETE /deployments/{name}/share-token",
    "GET /billing/balance",
    "GET /billing/usage",
    "GET /console/session",
    "GET /deployments",
    "GET /deployments/{name}",
    "GET /deployments/{name}/checkpoints",
    "GET /deployments/{name}/enroll-metadata",
    "GET /deployments/{name}/events",
    "GET /deployments/{name}/logs",
    "GET /deployments/{name}/ranks",
    "GET /deployments/{name}/results",
    "GET /deployments/{name}/series",
    "GET /deployments/{name}/share-token",
    "GET /deployments/{name}/watch",
    "GET /deployments/{name}/why",
    "GET /health",
    "GET /metrics",
    "GET /public/deployments/{name}/metadata",
    "GET /usage",
    "GET /watch",
    "POST /console/login-links",
    "POST /console/logout",
    "POST /deployments",
    "POST /deployments/{name}/cancel",
    "POST /deployments/{name}/enroll-metadata",
    "POST /deployments/{name}/exec",
    "POST /deployments/{name}/rerun",
    "POST /deployments/{name}/restart",
    "POST /deployments/{name}/scale-distributed",
    "POST /deployments/{name}/share-token",
    "POST /prune",
    "PUT /archives",
]
COMMANDS = [
    "completion",
    "config",
    "console",
    "diloco bench",
    "diloco gc",
    "diloco inspect",
    "diloco plan",
    "diloco resume",
    "doctor",
    "keys create",
    "keys list",
    "keys revoke",
    "local start",
    "local status",
    "local stop",
    "login",
    "logout",
    "manifests",
    "mesh-wait",
    "operator",
    "prune",
    "rendezvous",
    "run",
    "serve",
    "train bench",
    "train cancel",
    "train checkpoints",
    "train down",
    "train events",
    "train exec",
    "train exits",
    "train goodput",
    "train logs",
    "train ls",
    "train metrics",
    "train prune",
    "train ps",
    "train rerun",
    "train scale",
    "train status",
    "train up",
    "train wait",
    "train watch",
    "train why",
]


EXPORTS = """
AuthenticationError AuthorizationError BadResult BasilicaClient BasilicaError BelowMinimumWorld BenchPoint BenchResult
BenchStatus Checkpoint Conflict CrashLoop Culprit DeployOptions DeploymentNotFound DistributedError DistributedTraining
Event Goodput Incident Loss NameInUse NetworkError Notice PlannedChange Progress ProviderFilter QuotaExceeded RankAgent
RankExit RankReport RankStatus RateLimitError RendezvousUnavailable RunView Samples Series SeriesPoint ServerError
Stalled UDTerminalState ValidationError WorldClosed WorldSize WorldSizeOutOfBounds WorldStatus __version__ distributed
mesh_status mesh_wait mesh_wait_async notice report shutdown
"""


def test_what_the_package_exports() -> None:
    assert basilica.__all__ == EXPORTS.split()


def test_every_export_is_there() -> None:
    for name in basilica.__all__:
        assert getattr(basilica, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = basilica.nothing
    assert all(hasattr(basilica, name) for name in basilica.__all__)


def test_the_routes() -> None:
    async def paths() -> dict[str, dict[str, object]]:
        async with World() as world:
            document = world.app.openapi()
        found: dict[str, dict[str, object]] = document["paths"]
        return found

    found = asyncio.run(paths())
    assert sorted(f"{method.upper()} {path}" for path in found for method in found[path]) == ROUTES


def test_the_commands() -> None:
    assert sorted(commands(typer.main.get_command(app))) == COMMANDS


def commands(command: object, name: str = "") -> list[str]:
    """The leaves of a tree of commands, by their full names."""
    below = getattr(command, "commands", None)
    if below is None:
        return [name]
    return [leaf for child, c in below.items() for leaf in commands(c, f"{name} {child}".strip())]


def test_the_exit_codes_of_waits() -> None:
    from basilica.cli.train import outcome

    codes = {"failed": 1, "timed out": 124, "detached": 125, "cancelled": 130}
    assert codes == {
        "failed": outcome.FAILED,
        "timed out": outcome.TIMED_OUT,
        "detached": outcome.DETACHED,
        "cancelled": outcome.CANCELLED,
    }
    page = (Path(__file__).parents[1] / "docs/reference/exit-codes.md").read_text()
    assert all(f"\n| {code} | " in page for code in (0, 124, 125, 130))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["doctor"], 0),
        (["keys", "revoke", "nobody"], 1),
        (["prune", "--state-dir", "/nonexistent"], 1),
        (["frobnicate"], 2),
        (["serve", "--port", "http"], 2),
        (["serve", "--log-level", "loud"], 2),
        (["prune", "--older-than", "soon"], 2),
        (["config"], 0),
        (["completion", "bash"], 0),
        (["completion", "powershell"], 2),
        (["login", "nonsense", "--key-file", "/dev/null"], 2),
        (["train", "up", "--world-size", "0", "--", "true"], 2),
        (["train", "up", "--world-size", "1"], 2),
        (["train", "status", ".."], 1),
    ],
)
def test_exit_codes(arguments: list[str], code: int, tmp_path: object) -> None:
    command = [sys.executable, "-m", "basilica.cli.main", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={"BASILICA_STATE_DIR": str(tmp_path)}
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert done.stderr.startswith("basilica: ")
        assert done.stderr.count("\n") == 1
