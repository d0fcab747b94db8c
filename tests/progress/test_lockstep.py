"""Two programs that train in lockstep save at the same step, whenever a notice is published."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from basilica.machine.layout import Key
from basilica.progress.answers import Answer, read_answers
from basilica.progress.notice_file import PublishedNotice, write_notice
from tests.progress.conftest import AFTERWARDS, RUN, Place

PUBLICATIONS = 200
STUCK = 0.25  # seconds: many steps of these programs
TRAIN = """
import os, socket, basilica
place, rank = os.environ["MEET"], int(os.environ["BASILICA_RANK"])
if rank == 0:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place + ".made")
        listening.listen()
        os.rename(place + ".made", place)
        link, _ = listening.accept()
else:
    link = socket.socket(socket.AF_UNIX)
    while not os.path.exists(place): pass
    link.connect(place)
step = 0
while True:
    step += 1
    link.sendall(step.to_bytes(8))  # nobody ends a step before the other has begun it
    assert link.recv(8, socket.MSG_WAITALL) == step.to_bytes(8)
    basilica.report(step=step)
    notice = basilica.notice()
    if notice is not None:
        assert notice.step <= step, (notice, step)
        print(notice._published.number, step, flush=True)
        notice.ready()
"""
KEYS = (Key(RUN, 0, 1), Key(RUN, 1, 1))


class Announcer:
    """The control plane of the two: publishes steps until both are ready at one."""

    def __init__(self, place: Place, files: list[str], chance: random.Random) -> None:
        self._place, self._files, self._chance = place, files, chance
        self._number = 0
        self.agreed: list[tuple[int, int]] = []
        self.put_off = {"late": 0, "stuck": 0}

    def announce(self) -> None:
        """Publish a change at a random step ahead, and again with a later one as long as somebody was late for it."""
        answers, ahead = read_answers(self._place.layout, RUN), self._chance.randint(0, 20)
        while True:
            step = max((answer.step or 0) for answer in answers.values()) + ahead
            self._number += 1
            self._write(PublishedNotice(number=self._number, kind="scale", until=AFTERWARDS, step=step))
            answers = self._until_answered()
            if self._are(answers, "ready"):
                break
            self.put_off["late" if any(a.state == "late" for a in answers.values()) else "stuck"] += 1
            ahead = 2 * ahead + 1
        assert {answer.step for answer in answers.values()} == {step}
        self.agreed.append((self._number, step))
        self._write(None)
        self._wait(lambda found: self._are(found, "listening"))

    def _write(self, notice: PublishedNotice | None) -> None:
        for file in self._chance.sample(self._files, len(self._files)):
            write_notice(file, notice)

    def _are(self, answers: dict[Key, Answer], state: str) -> bool:
        return [(a.number, a.state) for a in answers.values()] == [(self._number, state)] * len(KEYS)

    def _until_answered(self) -> dict[Key, Answer]:
        """Wait until both are ready, one of them is late, or one is ready and the other one makes no progress."""
        since = time.monotonic()

        def is_answered(found: dict[Key, Answer]) -> bool:
            states = [answer.state for answer in found.values() if answer.number == self._number]
            stuck = "ready" in states and time.monotonic() - since > STUCK
            return self._are(found, "ready") or "late" in states or stuck

        return self._wait(is_answered)

    def _wait(self, done: Callable[[dict[Key, Answer]], bool]) -> dict[Key, Answer]:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = read_answers(self._place.layout, RUN)
            if set(found) == set(KEYS) and done(found):
                return found
            time.sleep(0.0005)
        raise AssertionError(read_answers(self._place.layout, RUN))


@pytest.mark.parametrize("hosts", [1, 2])
def test_both_stop_at_the_same_step_whenever_it_is_published(place: Place, tmp_path: Path, hosts: int) -> None:
    """With one host both read one file. With two each has its own, and one of them is written first."""
    files = [f"{place.layout.run(RUN)}/notice-{n}" for n in range(hosts)]
    for file in files:
        write_notice(file, None)
    meet = str(tmp_path / "meet")
    ranks = [place.start(TRAIN, rank=n, MEET=meet, BASILICA_NOTICE_FILE=files[n % hosts]) for n in (0, 1)]
    chance = random.Random(hosts)
    announcer = Announcer(place, files, chance)
    announcer._wait(lambda found: all(answer.listening == 1 for answer in found.values()))
    for _ in range(PUBLICATIONS):
        time.sleep(chance.random() * 0.004)  # at any moment of their steps
        announcer.announce()
    assert [rank.poll() for rank in ranks] == [None, None]
    for rank in ranks:
        rank.kill()
    given = []
    for rank in ranks:
        out, errors = rank.communicate(timeout=60)
        assert "AssertionError" not in errors
        given.append([(int(number), int(step)) for number, step in (line.split() for line in out.splitlines())])
    for told in given:
        assert set(announcer.agreed) <= set(told)  # both were given each of them, at its very step
    assert len(announcer.agreed) == PUBLICATIONS
    assert announcer.put_off["late"] > 0  # some were published too late, and had to be put off
