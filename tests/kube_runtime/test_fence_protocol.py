"""The fence, explored: an agent, a rendezvous, a controller and an API server that lose each other in any order.

The parts are the real ones: the agent's `Fence`, the rendezvous' `Presence`, the controller's `Heartbeats`, `Nodes` and
`Evidence`. Time goes in steps, the agent's clock at another rate than the others', and a rank that is told to end takes
all the time that it is given. A machine that is gone ends no connection: in half of the walks the controller notices
only as late as its connection does, and goes by what it read last until then. A second rank hears the rendezvous
whenever that is there: an agent that is alone with the rendezvous, cut off from everybody else, is outside of what the
protocol promises (ADR 19).
"""

import contextlib
import json
import random
from dataclasses import dataclass, field

import pytest

from basilica.core.fencing import Fence, FenceTimes
from basilica.kube.manifests.run import Settings
from basilica.rendezvous.client import ANSWER_WITHIN_S, NOTICED_AFTER_S
from basilica.rendezvous.names import HEARD
from basilica.rendezvous.presence import Heard, Presence, load_heard
from basilica.rendezvous.retries import AGAIN_MAX_S
from basilica.runtimes.kubernetes.node_evidence import SETTLE_BEATS, Evidence, Heartbeats, Nodes
from basilica.runtimes.kubernetes.wakes import LONGEST_PAUSE_S

TIMES = FenceTimes()
PATIENCE = 30.0
STEP = 0.5
KUBERNETES_GRACE, KUBERNETES_LOOKS_EVERY = 50.0, 5.0
WALKS, LENGTH_S = 250, 500.0


@dataclass
class Agent:
    """With its rank. `rate`: how fast its clock goes."""

    name: str
    rate: float = 1.0
    fence: Fence = field(default_factory=lambda: Fence(TIMES.heartbeat, TIMES.fence_after, TIMES.fence_grace))
    beat_at: float = 0.0
    dies_at: float | None = None  # when its rank is killed at the latest
    machine_is_gone: bool = False

    def clock(self, now: float) -> float:
        return now * self.rate

    def runs(self, now: float) -> bool:
        """It begins when the rendezvous has heard of it."""
        began = self.fence.word_at is not None
        return began and not self.machine_is_gone and (self.dies_at is None or now < self.dies_at)


class World:
    def __init__(self, rate: float, notices_after: float = 0.0) -> None:
        self.now, self.notices_after = 0.0, notices_after
        self.old, self.other = Agent("old", rate), Agent("other")
        self.presence: Presence | None = Presence()
        self.keys: dict[str, Heard] = {}
        self.cut_agent = self.cut_controller = self.api_away = self.cut_node = False
        self.api_away_since = self.node_silent_since = 0.0
        self.replaced_at: float | None = None
        self.controller_starts()

    # ---- what may happen

    def controller_starts(self) -> None:
        self.heartbeats, self.nodes = Heartbeats(TIMES), Nodes()
        self.followed: Presence | None = None  # the rendezvous that the controller's connection is to
        self.undelivered: dict[str, Heard | None] = {}
        self.seen_away = self.unanswered = 0.0
        if not self.api_away:
            self._look_at_nodes()

    def rendezvous_ends(self) -> None:
        self.presence = None

    def rendezvous_starts(self) -> None:
        """Here or elsewhere, with what it kept or without: it has heard nobody."""
        if self.presence is None:
            self.presence, self.keys = Presence(), {}

    # ---- time

    def step(self) -> None:
        self.now += STEP
        for agent in (self.old, self.other):
            self._beat(agent)
            if agent.dies_at is None and agent.fence.closed(agent.clock(self.now)):
                agent.dies_at = self.now + agent.fence.grace / agent.rate
        if self.presence is not None:
            self._publish(self.presence.fallen_silent(self.now))
        self._control()

    def _beat(self, agent: Agent) -> None:
        if agent.machine_is_gone or self.now < agent.beat_at:
            return
        reached = self.presence is not None and not (agent is self.old and self.cut_agent)
        agent.beat_at = self.now + (TIMES.heartbeat / agent.rate if reached else 1.0)
        if reached and self.presence is not None:
            sent = agent.clock(self.now)
            changes = self.presence.heard(agent.name, TIMES.heartbeat, agent.fence.silence(sent), self.now)
            self._publish(changes)
            agent.fence.answered(sent)

    def _publish(self, changes: dict[str, str | None]) -> None:
        for key, value in changes.items():
            name = key.removeprefix(f"{HEARD}/")
            heard = None if value is None else load_heard(value)
            if heard is None:
                self.keys.pop(name, None)
            else:
                self.keys[name] = heard
            if self.followed is self.presence:
                self.undelivered[name] = heard

    def _control(self) -> None:
        answers = self.presence is not None and not self.cut_controller
        if self.followed is not None and (self.followed is not self.presence or not answers):
            self.unanswered += STEP
            if self.unanswered >= self.notices_after:
                self.heartbeats.pause(self.now)
                self.followed = None
        elif self.followed is not None:
            self.unanswered = 0.0
            for name, heard in self.undelivered.items():
                self.heartbeats.update(name, heard, self.now)
            self.undelivered = {}
        if self.followed is None and answers:
            self.heartbeats.reload(dict(self.keys), self.now)
            self.followed, self.undelivered, self.unanswered = self.presence, {}, 0.0
        if self.api_away:
            self.seen_away += STEP
            return
        if self.seen_away:
            self.nodes.api_returned(self.seen_away, self.now)
            self.seen_away = 0.0
        self._look_at_nodes()
        evidence = Evidence(
            now=self.now,
            nodes=self.nodes.facts,
            counted_from=self.nodes.counted_from,
            patience=PATIENCE,
            lost_after=TIMES.lost_after,
            silences={"old": self.heartbeats.silence("old", self.now)},
        )
        if self.replaced_at is None and evidence.is_lost("old", "a"):
            self.replaced_at = self.now
            assert not self.old.runs(self.now), "two of one rank"

    def _look_at_nodes(self) -> None:
        """A node is unready a while after its last word; its word does not arrive while the API server is away."""
        silent = self.old.machine_is_gone or self.cut_node
        self.node_silent_since = self.node_silent_since or self.now if silent else 0.0
        unready = bool(silent) and self.now - self.node_silent_since >= KUBERNETES_GRACE
        for name, status in (("a", "Unknown" if unready else "True"), ("b", "True")):
            found = {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": status}]}}
            self.nodes.update(found, self.now)


def walk(seed: int) -> World:
    rng = random.Random(seed)
    world = World(rate=rng.uniform(0.97, 1.03), notices_after=rng.choice((0.0, NOTICED_AFTER_S)))
    while world.now < LENGTH_S:
        if rng.random() < 0.02:
            match rng.choice(("agent", "node", "controller", "api", "rendezvous", "leader", "both", "heal", "back")):
                case "agent":
                    world.cut_agent = not world.cut_agent
                case "node":
                    world.cut_node = not world.cut_node
                case "both":
                    world.cut_agent = world.cut_node = True
                case "controller":
                    world.cut_controller = not world.cut_controller
                case "api":
                    world.api_away = not world.api_away
                case "rendezvous":
                    world.rendezvous_ends()
                case "back":
                    world.rendezvous_starts()
                case "leader":
                    world.controller_starts()
                case "heal":
                    world.cut_agent = world.cut_node = world.cut_controller = world.api_away = False
                    world.rendezvous_starts()
        world.step()
    return world


def all_walks() -> list[World]:
    return [walk(seed) for seed in range(WALKS)]


def test_there_are_never_two_of_one_rank() -> None:
    replaced = [world for world in all_walks() if world.replaced_at is not None]
    assert len(replaced) > WALKS / 20, "a walk in which nobody is ever replaced shows nothing"


def test_a_fence_that_is_slower_than_the_controller_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exploration sees what it is there for."""
    monkeypatch.setattr(FenceTimes, "lost_after", property(lambda self: self.fence_after))
    with pytest.raises(AssertionError, match="two of one rank"):
        all_walks()


def test_a_controller_that_does_not_listen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heartbeats, "silence", lambda self, agent, now: 1e9)
    with pytest.raises(AssertionError, match="two of one rank"):
        all_walks()


@pytest.mark.parametrize("lost_with_it", [(), ("rendezvous",), ("rendezvous", "leader"), ("leader",)])
def test_a_machine_that_dies_is_given_up_in_time(lost_with_it: tuple[str, ...]) -> None:
    world = World(rate=1.0, notices_after=NOTICED_AFTER_S)
    while world.now < 100.0:
        world.step()
    died = world.now
    world.old.machine_is_gone = True
    if "rendezvous" in lost_with_it:
        world.rendezvous_ends()
    while world.replaced_at is None and world.now < died + 300.0:
        if "leader" in lost_with_it and world.now == died + 20.0:
            world.controller_starts()
        if world.now == died + TIMES.rendezvous_back:
            world.rendezvous_starts()
        world.step()
    assert world.replaced_at is not None
    assert world.replaced_at - died <= 111.0
    assert world.other.runs(world.now), "a rendezvous that moves stops nobody"


def test_the_times_add_up_for_a_rank_that_is_lost_with_its_rendezvous() -> None:
    """By the rules, from the moment at which its machine is cut off, in the worst case of each."""
    node_is_lost = KUBERNETES_GRACE + KUBERNETES_LOOKS_EVERY + Settings(image="any").node_seconds
    agents_are_heard = TIMES.rendezvous_back + ANSWER_WITHIN_S + AGAIN_MAX_S + SETTLE_BEATS * TIMES.heartbeat
    rank_has_ended = NOTICED_AFTER_S + TIMES.lost_after
    assert (node_is_lost, agents_are_heard, rank_has_ended) == (85.0, 91.0, 101.0)
    assert max(node_is_lost, agents_are_heard, rank_has_ended) + LONGEST_PAUSE_S == 104.0  # as ADR 19 says


@pytest.mark.parametrize(("notices_after", "is_safe"), [(NOTICED_AFTER_S, True), (20.0, False)])
def test_what_was_read_last_is_relied_on_for_less_time_than_a_cut_off_rank_takes_to_end(
    notices_after: float, is_safe: bool
) -> None:
    """An agent reaches its rendezvous again just before its fence, and just after the controller has lost it."""
    world = World(rate=1.0, notices_after=notices_after)
    while world.now < 100.0:
        world.step()
    world.cut_agent = world.cut_node = True
    ends = world.old.fence.ends_at()
    assert ends is not None
    while world.now < ends - 2.0:
        world.step()
    world.cut_controller = True
    world.step()
    world.cut_agent = False
    with contextlib.nullcontext() if is_safe else pytest.raises(AssertionError, match="two of one rank"):
        while world.now < 400.0:
            world.step()
    assert world.old.runs(world.now)


def test_without_a_rendezvous_nobody_is_replaced_however_long() -> None:
    world = World(rate=1.0)
    world.step()
    world.old.machine_is_gone = True
    world.rendezvous_ends()
    while world.now < 2000.0:
        world.step()
    assert world.replaced_at is None
    assert not world.other.runs(world.now), "and those that are alone have stopped: they may have been replaced"


def test_what_is_published_can_be_read() -> None:
    assert load_heard(json.dumps({"gap": None})) == Heard()
