"""Runs of every kind on a server that is killed again and again; each run knows how it must have ended.

Ranks write a ledger of their own (one line per start, appended atomically), so that "no rank started twice" is told
by the ranks and not by the server that is under test.
"""

import http.client
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.server import LastingServer

TELL = 'echo "$BASILICA_DEPLOYMENT $BASILICA_RANK $BASILICA_ATTEMPT" >> "$LEDGER"; '
PATIENCE = 120.0


class PatientClient:
    """Asks again when the server was away; a create carries a key, so asking again makes no second run."""

    def __init__(self, server: LastingServer) -> None:
        self._address = urlsplit(server.url).netloc
        self._key = server.key

    def call(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict[str, Any]]:
        deadline = time.monotonic() + PATIENCE
        while True:
            connection = http.client.HTTPConnection(self._address, timeout=20)
            try:
                headers["Authorization"] = f"Bearer {self._key}"
                data = None if body is None else json.dumps(body)
                connection.request(method, path, data, headers)
                response = connection.getresponse()
                return response.status, json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError):
                assert time.monotonic() < deadline, f"no answer to {method} {path}"
                time.sleep(0.05)
            finally:
                connection.close()

    def create(self, key: str, body: dict[str, Any]) -> str:
        status, answer = self.call("POST", "/deployments", body, **{"Idempotency-Key": key})
        assert status == 201, answer
        name: str = answer["instanceName"]
        return name

    def wait(self, name: str, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline, version = time.monotonic() + PATIENCE, 0
        while True:
            status, answer = self.call("GET", f"/deployments/{name}/watch?since={version}&wait=5")
            assert status == 200, answer
            if done(answer):
                return answer
            assert time.monotonic() < deadline, f"{name} hangs: {answer['distributed']['blockedOn']}"
            version = answer["version"]


@dataclass
class Chaos:
    """`kills` kills of the server under `width` runs at a time. `faults` holds what went wrong, in words."""

    directory: Path
    seed: int
    kills: int
    width: int = 20
    faults: list[str] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        print(f"chaos: seed {self.seed}, {self.kills} kills under {self.width} runs", flush=True)
        chance = random.Random(self.seed)
        self.ledger = self.directory / "ledger"
        self.token = f"chaos-{os.getpid()}-{self.seed}"
        self.server = LastingServer(self.directory / "state")
        self.client = PatientClient(self.server)
        actors = [threading.Thread(target=self._act, args=(n, chance.random()), daemon=True) for n in range(self.width)]
        for actor in actors:
            actor.start()
        for number in range(self.kills):
            time.sleep(chance.uniform(0.02, 1.0))
            self.server.kill()
            if chance.random() < 0.3:
                time.sleep(chance.uniform(0.0, 0.8))  # long enough for ranks to end while nobody looks
            self.server.start_again()
            print(f"  kill {number + 1} of {self.kills}: {sum(self.finished.values())} runs checked", flush=True)
        self._stop.set()
        for actor in actors:
            actor.join(PATIENCE)
        self._check_ledger()
        self.server.stop()
        self._check_nothing_left()

    # ---- the runs ------------------------------------------------------------------------------------------------

    def _act(self, number: int, seed: float) -> None:
        chance = random.Random(seed)
        stories = [self._finishes, self._fails, self._is_killed, self._restarts, self._is_scaled, self._is_cancelled]
        stories.append(self._is_deleted)
        turn = 0
        while not self._stop.is_set():
            turn += 1
            story = chance.choice(stories)
            try:
                story(f"run-{number}-{turn}", chance)
                self.finished[story.__name__.strip("_")] += 1
            except AssertionError as fault:
                self.faults.append(f"{story.__name__} run-{number}-{turn}: {fault}")

    def _deploy(self, name: str, script: str, low: int, target: int, high: int, **more: object) -> str:
        body = {
            "instanceName": name,
            "env": {"LEDGER": str(self.ledger), "CHAOS": self.token},
            "distributed": {
                "worldSize": {"min": low, "target": target, "max": high},
                "command": TELL + script,
                "graceSeconds": 2,
                **more,
            },
        }
        return self.client.create(f"{self.token}-{name}", body)

    def _ended(self, name: str) -> dict[str, Any]:
        answer = self.client.wait(name, lambda a: bool(a["distributed"]["settled"]))
        answer["codes"] = {e["rank"]: e["exitCode"] for e in answer["distributed"]["rankExits"]}
        return answer

    def _finishes(self, name: str, chance: random.Random) -> None:
        run = self._ended(self._deploy(name, f"sleep {chance.uniform(0, 2):.2f}", 2, 2, 2))
        assert (run["phase"], run["codes"]) == ("succeeded", {0: 0, 1: 0}), run

    def _fails(self, name: str, chance: random.Random) -> None:
        script = f'[ "$RANK" = 1 ] && sleep {chance.uniform(0, 1):.2f} && exit 3; sleep 60'
        run = self._ended(self._deploy(name, script, 2, 2, 2))
        assert (run["phase"], run["codes"].get(1)) == ("failed", 3), run
        assert run["distributed"]["culprit"]["rank"] == 1, run
        assert run["codes"].get(0) in (None, 143), run  # stopped by us, if it had started at all

    def _is_killed(self, name: str, chance: random.Random) -> None:
        run = self._ended(self._deploy(name, f"sleep {chance.uniform(0, 1):.2f}; kill -9 $$", 1, 1, 1))
        exit = run["distributed"]["rankExits"][0]
        assert (run["phase"], exit["exitCode"], exit["signal"]) == ("failed", 137, "SIGKILL"), run

    def _restarts(self, name: str, chance: random.Random) -> None:
        script = f'sleep {chance.uniform(0, 0.5):.2f}; [ "$BASILICA_ATTEMPT" -ge 1 ] || exit 7'
        run = self._ended(self._deploy(name, script, 1, 1, 1, maxRestarts=1))
        assert (run["phase"], run["codes"]) == ("succeeded", {0: 0}), run
        assert run["distributed"]["rankExits"][0]["restartCount"] == 1, run

    def _is_scaled(self, name: str, chance: random.Random) -> None:
        instance = self._deploy(name, 'while [ ! -e "$LEDGER.$BASILICA_DEPLOYMENT" ]; do sleep 0.1; done', 1, 2, 3)
        for target in chance.sample([1, 2, 3], 2):
            status, answer = self.client.call("POST", f"/deployments/{instance}/scale-distributed", {"target": target})
            assert status == 200, answer
            self.client.wait(instance, lambda a, target=target: _at(a, target))  # type: ignore[misc]
        Path(f"{self.ledger}.{instance}").touch()
        run = self._ended(instance)
        assert (run["phase"], run["codes"]) == ("succeeded", dict.fromkeys(range(target), 0)), run

    def _is_cancelled(self, name: str, chance: random.Random) -> None:
        instance = self._deploy(name, "sleep 60", 2, 2, 2)
        time.sleep(chance.uniform(0, 0.5))
        status, answer = self.client.call("POST", f"/deployments/{instance}/cancel")
        assert status == 200, answer
        run = self._ended(instance)
        assert run["phase"] == "cancelled", run
        assert set(run["codes"].values()) <= {143}, run

    def _is_deleted(self, name: str, chance: random.Random) -> None:
        instance = self._deploy(name, "sleep 60", 1, 2, 2)
        time.sleep(chance.uniform(0, 0.5))
        deadline = time.monotonic() + PATIENCE
        while self.client.call("DELETE", f"/deployments/{instance}?wait=5")[0] != 404:
            assert time.monotonic() < deadline, f"{instance} is not gone"

    # ---- afterwards ----------------------------------------------------------------------------------------------

    def _check_ledger(self) -> None:
        starts = Counter(self.ledger.read_text().splitlines())
        self.faults += [f"started {count} times: {line}" for line, count in starts.items() if count > 1]
        _, listing = self.client.call("GET", "/deployments")
        listed = {d["instanceName"] for d in listing["deployments"]}
        kept = sum(self.finished.values()) - self.finished["is_deleted"]
        if len(listed) != kept + len(self.faults):
            self.faults.append(f"{len(listed)} runs are listed, {kept} were finished and not deleted")

    def _check_nothing_left(self) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                left = self.token.encode() in (process / "environ").read_bytes()
            except OSError:
                continue
            if left:
                self.faults.append(f"process {process.name} is left: {(process / 'cmdline').read_bytes()!r}")


def _at(answer: dict[str, Any], target: int) -> bool:
    gang = answer["distributed"]
    running = [r for r in gang["ranks"] if r["state"] in ("running", "stopping")]
    return (
        gang["observedGeneration"] == gang["generation"]
        and gang["worldSize"]["ready"] == target
        and len(running) == target
    )
