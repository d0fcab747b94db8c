"""The server is killed and started again; the published client's training object goes on as if nothing had been."""

from pathlib import Path

from tests.e2e.official.telling import ControlPlane, Telling
from tests.e2e.server import wait_for

STORY = "a_training_survives_the_death_of_its_server"


def test_a_training_survives_the_death_of_its_server(version: str, server: ControlPlane, tmp_path: Path) -> None:
    """Rank 1 ends while there is no server, the others after it is back; nobody's exit code is lost."""
    telling = Telling(version, server, [STORY], tmp_path)
    try:
        here = tmp_path / STORY
        wait_for((here / "deployed").exists, "the deployed run")
        server.kill()
        (here / "rank-1-may-end").touch()
        rank_1 = Path("/proc", (here / "pid-1").read_text().strip())
        wait_for(lambda: not rank_1.exists(), "the end of rank 1")
        wait_for((here / "noticed").exists, "the client to notice")
        server.start_again()
        (here / "restarted").touch()
        seen = telling.seen(STORY)
    finally:
        telling.close()
    assert seen["down"]["raised"] == "ConnectionError"
    assert seen["phase"] == "succeeded"
    assert seen["world"] == {"ready": 1, "target": 3, "min": 1, "max": 3, "below_minimum": False}
    assert [(e["rank"], e["exit_code"], e["termination_reason"], e["restart_count"]) for e in seen["exits"]] == [
        (0, 0, "Completed", 0),
        (1, 3, "Error", 0),
        (2, 137, "SIGKILL", 0),
    ]
    assert seen["logs"] == ["0| up", "1| going", "1| up", "2| up"]
