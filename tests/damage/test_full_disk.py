"""A full disk: what is new is refused, what ends things works, and the server can start again."""

import os
import time
from pathlib import Path

import httpx2
import pytest

from basilica.machine.reserve import LARGEST, SMALLEST, Reserve, may_refill, size_for
from tests.support.disk import fill, small_disk
from tests.support.server import ended, phase_is, run_request, serving, wait_for

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")


@pytest.mark.parametrize(
    ("disk", "size"), [(0, SMALLEST), (4 << 20, SMALLEST), (100 << 20, 5 << 20), (1 << 40, LARGEST)]
)
def test_the_reserve_is_small_on_any_disk(disk: int, size: int) -> None:
    assert size_for(disk) == size


def test_the_reserve_never_takes_the_last_space() -> None:
    assert may_refill(100, 200)
    assert not may_refill(100, 199)


def test_the_reserve_is_given_up_in_pieces_and_made_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 << 20):
        reserve = Reserve(tmp_path / "disk" / "reserve")
        reserve.open()
        assert reserve.whole
        before = reserve.free()
        fill(tmp_path / "disk" / "filler")
        note = tmp_path / "disk" / "note"
        tries = []

        def work() -> None:
            tries.append(note.write_bytes(bytes(40 << 10)))

        reserve.spend(work)
        assert tries == [40 << 10]
        assert not reserve.refill()
        (tmp_path / "disk" / "filler").unlink()
        assert reserve.refill()
        assert reserve.free() < before


def test_on_a_full_disk_the_run_that_fills_it_can_be_cancelled_and_all_be_deleted(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 3 << 20):
        state = tmp_path / "disk" / "state"
        with serving(state) as server, server.client() as client:
            for name in ("first", "second"):
                client.post("/deployments", json=run_request(name, "sleep 1000")).raise_for_status()
                wait_for(client, name, phase_is("ready"))
            client.post(
                "/deployments", json=run_request("filler", "while :; do head -c 65536 /dev/zero; done; sleep 1000")
            ).raise_for_status()
            until_full(tmp_path / "disk")
            refused = client.post("/deployments", json=run_request("third", "true"))
            assert refused.status_code == 507, refused.text
            problem = refused.json()["error"]
            assert problem["code"] == "BASILICA_API_SERVICE_UNAVAILABLE"
            assert "the disk is full" in problem["message"]
            health = client.get("/health").json()
            assert health["status"] == "degraded"
            assert [trouble["kind"] for trouble in health["troubles"]] == ["DiskFull"]
            assert "the disk of" in client.get("/deployments/first/why").json()["why"]
            assert client.post("/deployments/first/cancel").status_code == 200
            assert wait_for(client, "first", ended)["phase"] == "cancelled"
            assert client.delete("/deployments/second", params={"wait": 20}).json()["state"] == "Deleted"
            assert client.post("/deployments/filler/cancel").status_code == 200
            assert wait_for(client, "filler", ended)["phase"] == "cancelled"
            assert client.delete("/deployments/filler", params={"wait": 20}).json()["state"] == "Deleted"
            client.post("/deployments", json=run_request("third", "exit 0")).raise_for_status()
            assert wait_for(client, "third", ended)["phase"] == "succeeded"
            assert client.get("/health").json()["status"] == "healthy"
            assert (state / "reserve").stat().st_size == SMALLEST


def test_a_server_starts_again_on_a_full_disk_and_can_end_what_runs(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 3 << 20):
        state = tmp_path / "disk" / "state"
        with serving(state) as server, server.client() as client:
            client.post("/deployments", json=run_request("first", "sleep 1000")).raise_for_status()
            wait_for(client, "first", phase_is("ready"))
            fill(tmp_path / "disk" / "filler")
            server.kill()
        fill(tmp_path / "disk" / "filler")
        with serving(state) as server, server.client() as client:
            fill(tmp_path / "disk" / "filler")
            assert client.get("/health").json()["status"] == "degraded"
            assert client.post("/deployments", json=run_request("more", "true")).status_code == 507
            assert wait_for(client, "first", phase_is("ready"))
            assert client.delete("/deployments/first", params={"wait": 20}).json()["state"] == "Deleted"
            (tmp_path / "disk" / "filler").unlink()
            client.post("/deployments", json=run_request("more", "exit 0")).raise_for_status()
            assert wait_for(client, "more", ended)["phase"] == "succeeded"


def test_a_run_that_could_not_start_for_want_of_space_can_be_deleted(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 3 << 20):
        state = tmp_path / "disk" / "state"
        with serving(state) as server, server.client() as client:
            script = "exit 1"  # and a restart, for which there is no space
            request = run_request("first", f"while [ -e {tmp_path}/hold ]; do sleep 0.05; done; {script}")
            request["distributed"]["maxRestarts"] = 3
            (tmp_path / "hold").touch()
            client.post("/deployments", json=request).raise_for_status()
            wait_for(client, "first", phase_is("ready"))
            fill(tmp_path / "disk" / "filler")
            (tmp_path / "hold").unlink()
            wait_for(client, "first", lambda body: body["phase"] != "ready")
            assert client.delete("/deployments/first", params={"wait": 20}).json()["state"] == "Deleted"
            (tmp_path / "disk" / "filler").unlink()


def until_full(disk: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = os.statvfs(disk)
        if found.f_bavail * found.f_frsize < 16 << 10:
            return
        time.sleep(0.01)
    raise AssertionError("it does not fill up")


def test_writes_that_end_things_outlast_any_number_of_creates(tmp_path: Path) -> None:
    """Refused creates use none of what is held back."""
    with small_disk(tmp_path / "disk", 3 << 20):
        state = tmp_path / "disk" / "state"
        with serving(state) as server, server.client() as client:
            client.post("/deployments", json=run_request("first", "sleep 1000")).raise_for_status()
            wait_for(client, "first", phase_is("ready"))
            fill(tmp_path / "disk" / "filler")
            held = (state / "reserve").stat().st_size
            answers = [many(client, number) for number in range(30)]
            assert {answer.status_code for answer in answers} == {507}
            assert (state / "reserve").stat().st_size == held
            assert client.delete("/deployments/first", params={"wait": 20}).json()["state"] == "Deleted"


def many(client: httpx2.Client, number: int) -> httpx2.Response:
    return client.post("/deployments", json=run_request(f"more-{number}", "true"))
