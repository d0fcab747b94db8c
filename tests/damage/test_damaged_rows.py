"""One run's record that cannot be read is that run's failure, and nobody else's."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import basilica
from basilica.machine.strays import with_environment
from tests.support.server import ended, phase_is, run_request, serving, wait_for


def spoil(state: Path, name: str, statement: str) -> str:
    """Spoil the stored record of that run; its instance name."""
    with closing(sqlite3.connect(state / "basilica.db", isolation_level=None)) as connection:
        row, instance = connection.execute("SELECT id, instance FROM deployments WHERE name = ?", (name,)).fetchone()
        connection.execute(statement, (row,))
    return str(instance)


DAMAGE = {
    "spec": "UPDATE specs SET spec = substr(spec, 1, 40) WHERE deployment = ?",
    "status": "UPDATE deployments SET status = CAST(x'ff00ff' AS TEXT) WHERE id = ?",
    "no spec": "DELETE FROM specs WHERE deployment = ?",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_run_is_listed_named_and_deleted_and_the_others_go_on(state: Path, damage: str) -> None:
    with serving(state) as server, server.client() as client:
        for name in ("before", "spoilt", "after"):
            client.post("/deployments", json=run_request(name, "sleep 1000")).raise_for_status()
            wait_for(client, name, phase_is("ready"))
        server.kill()
    instance = spoil(state, "spoilt", damage)
    with serving(state) as server, server.client() as client:
        listed = client.get("/deployments")
        assert listed.status_code == 200
        rows = {row["friendlyName"]: row for row in listed.json()["deployments"]}
        assert [rows[name]["phase"] for name in ("before", "spoilt", "after")] == ["ready", "damaged", "ready"]
        assert rows["spoilt"]["state"] == "Damaged"
        assert "delete the run" in rows["spoilt"]["message"]
        for name in ("spoilt", instance):
            found = client.get(f"/deployments/{name}").raise_for_status().json()
            assert (found["instanceName"], found["phase"], found["state"]) == (instance, "damaged", "Damaged")
            assert "delete the run" in found["message"]
            answer = client.get(f"/deployments/{name}/why")
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "DeploymentDamaged")
            assert answer.json()["error"]["retryable"] is False
            assert instance in answer.json()["error"]["message"]
        with basilica.BasilicaClient(server.url, server.key) as sdk, pytest.raises(basilica.Conflict, match="delete"):
            sdk.training("spoilt")
        assert "is left alone" in server.stderr
        assert server.stderr.count("is left alone") == 1
        assert client.post("/deployments/after/cancel").status_code == 200
        assert wait_for(client, "after", ended)["phase"] == "cancelled"
        ranks = ranks_of(state, instance)
        assert ranks
        gone = client.delete(f"/deployments/{instance}", params={"wait": 20})
        assert gone.json()["state"] == "Deleted"
        assert ranks_of(state, instance) == []
        assert {row["friendlyName"] for row in client.get("/deployments").json()["deployments"]} == {"before", "after"}
        assert not (state / "runs" / instance).exists()


def ranks_of(state: Path, instance: str) -> list[int]:
    return with_environment({f"BASILICA_CHECKPOINT_DIR={state}/runs/{instance}/checkpoints".encode()})
