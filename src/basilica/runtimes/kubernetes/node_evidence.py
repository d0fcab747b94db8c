"""Evidence that a rank is lost with its node: which facts count, and from when. Pure; times are of one monotonic clock.

A node that is not ready is no evidence by itself. It means that the API server has not heard from the kubelet, and the
rank may be well. The evidence counts only

- from the API server's return, if it was away: no node could report to it meanwhile;
- from when at least one node was ready again, if all were unready together: Kubernetes evicts no pod then either;
- once the run's rendezvous has not heard from the rank's agent for `FenceTimes.lost_after`, so that an agent that is
  cut off has stopped its rank before another is launched (`core.fencing`).

While the rendezvous itself does not answer no rank is lost: unknown is a state. A rendezvous that has just started has
heard from no agent yet. Then the silence of an agent begins with the last contact that anybody had with the former
rendezvous: the agents that are there report theirs, and our mirror knows until when it followed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from basilica.core.fencing import FenceTimes
from basilica.kube.manifests.run import PROVIDER, REGION
from basilica.rendezvous.presence import MISSED, Heard

Json = dict[str, Any]

AWAY_COUNTS_S = 5.0  # an API server that was away for less has missed no report of a kubelet that mattered
SETTLE_BEATS = 3.0  # until all agents that are there have found a rendezvous that has just started


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """`unready_since`: when we noticed that the node does not answer; None while it does."""

    provider: str | None = None
    region: str | None = None
    unready_since: float | None = None


class Nodes:
    """The nodes of the cluster, and the moment from which their silence counts."""

    def __init__(self) -> None:
        self.facts: dict[str, NodeFacts] = {}
        self.counted_from = 0.0

    def update(self, node: Json, now: float) -> NodeFacts:
        """Update a node from the API server's object. `now` is by our own clock, not by another machine's."""
        name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
        conditions = (node.get("status") or {}).get("conditions") or ()
        ready = next((each for each in conditions if each["type"] == "Ready"), None)
        unready = ready is not None and ready["status"] != "True"
        before = self.facts.get(name)
        noticed = before.unready_since if before is not None and before.unready_since is not None else now
        none_was_ready = self.all_unready
        self.facts[name] = NodeFacts(labels.get(PROVIDER), labels.get(REGION), noticed if unready else None)
        self._count_anew(none_was_ready, now)
        return self.facts[name]

    def drop(self, name: str, now: float) -> None:
        none_was_ready = self.all_unready
        self.facts.pop(name, None)
        self._count_anew(none_was_ready, now)

    def api_returned(self, away_for: float, now: float) -> None:
        """Note that the API server answers again after `away_for` seconds."""
        if away_for >= AWAY_COUNTS_S:
            self.counted_from = max(self.counted_from, now)

    @property
    def all_unready(self) -> bool:
        return bool(self.facts) and all(facts.unready_since is not None for facts in self.facts.values())

    def _count_anew(self, none_was_ready: bool, now: float) -> None:
        if none_was_ready and not self.all_unready:
            self.counted_from = max(self.counted_from, now)


class Heartbeats:
    """The agents that the run's rendezvous hears from, by its keys, with the moments at which the keys were read."""

    def __init__(self, times: FenceTimes) -> None:
        self._times = times
        self._entries: dict[str, tuple[Heard, float]] = {}
        self._heard: set[str] = set()
        self._last_word: float | None = None  # the last contact of any agent with the former rendezvous
        self._fresh_since: float | None = None
        self._followed_until = 0.0

    def reload(self, entries: Mapping[str, Heard], now: float) -> None:
        """Replace all entries after a full read of the keys. An unchanged entry keeps its age."""
        before = self._entries
        self._entries, self._heard, self._last_word = {}, set(), None
        for agent, heard in entries.items():
            known = before.get(agent)
            self.update(agent, heard, known[1] if known is not None and known[0] == heard else now)
        if self._fresh_since is None:
            self._fresh_since = now

    def update(self, agent: str, heard: Heard | None, now: float) -> None:
        """Update the entry of one agent; None: its key is gone."""
        self._heard.discard(agent)
        if heard is None:
            self._entries.pop(agent, None)
            return
        self._entries[agent] = (heard, now)
        if heard.silent is None:
            self._heard.add(agent)
        if heard.gap is not None:
            self._last_word = max(now - heard.gap, self._last_word or 0.0)

    def pause(self, now: float) -> None:
        """Note that the rendezvous does not answer any more."""
        if self._fresh_since is not None:
            self._fresh_since, self._followed_until = None, now

    def settles_in(self, now: float) -> float:
        """Return the seconds until the rendezvous must have heard from all agents that are there."""
        left = 0.0 if self._fresh_since is None else self._fresh_since + SETTLE_BEATS * self._times.heartbeat - now
        return max(0.0, left)

    def silence(self, agent: str, now: float) -> float | None:
        """Return for how many seconds the rendezvous has not heard from an agent; None while it does not answer."""
        if self._fresh_since is None:
            return None
        if agent in self._entries:
            heard, learnt = self._entries[agent]
            return 0.0 if heard.silent is None else now - learnt + heard.silent
        if self._last_word is None or self.settles_in(now) > 0.0:
            return now - self._fresh_since
        return now - min(self._fresh_since, max(self._last_word, self._followed_until))

    def missed(self, agent: str, now: float) -> float | None:
        """Return the silence of an agent, if it is long enough to be shown: it was heard from before, or others are."""
        silence = self.silence(agent, now)
        known = agent in self._entries or bool(self._heard)
        return silence if known and silence is not None and silence >= MISSED * self._times.heartbeat else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The facts at one moment. `patience`: how long an unready node is waited for.

    `silences`: of agents, by the uid of their pod, where the rendezvous answers. `missed`: those to be shown.
    `settles_in`: seconds until a rendezvous that has just started must have heard from all agents that are there.
    """

    now: float = 0.0
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)
    counted_from: float = 0.0
    patience: float = 30.0
    lost_after: float = FenceTimes().lost_after
    silences: Mapping[str, float | None] = field(default_factory=dict)
    missed: Mapping[str, float] = field(default_factory=dict)
    settles_in: float = 0.0

    def facts(self, node: str) -> NodeFacts:
        return self.nodes.get(node, NodeFacts())

    def is_ready(self, node: str) -> bool:
        """Whether the node's kubelet reports on its pods. A node that is not in the cluster does not."""
        return node in self.nodes and self.nodes[node].unready_since is None

    def is_unready(self, node: str) -> bool:
        return self.facts(node).unready_since is not None

    def is_silent(self, pod: str) -> bool:
        """Whether the agent in the pod, should it live, has stopped its rank by now."""
        silence = self.silences.get(pod)
        return silence is not None and silence >= self.lost_after

    def silent_in(self, pod: str) -> float | None:
        """Return the seconds until `is_silent`, if nothing changes; None if that needs a change, or has come."""
        silence = self.silences.get(pod)
        if not silence or silence >= self.lost_after:
            return None
        left = self.lost_after - silence
        return min(left, self.settles_in) if self.settles_in > 0.0 else left

    def node_is_lost(self, node: str) -> bool:
        due = self._node_due(node)
        return due is not None and self.now >= due

    def is_heard(self, pod: str) -> bool:
        return self.silences.get(pod) == 0.0

    def is_lost(self, pod: str, node: str) -> bool:
        return self.node_is_lost(node) and self.is_silent(pod)

    def lost_in(self, pod: str, node: str) -> float | None:
        """Return the seconds until the pod's rank counts as lost, if nothing changes; None if that needs a change, or
        has come.
        """
        due, silence = self._node_due(node), self.silences.get(pod)
        if due is None or not silence:
            return None
        left = max(due - self.now, self.lost_after - silence)
        if self.settles_in > 0.0:
            left = min(left, self.settles_in)  # more may be known by then
        return left if left > 0.0 else None

    def _node_due(self, node: str) -> float | None:
        since = self.facts(node).unready_since
        if since is None or all(facts.unready_since is not None for facts in self.nodes.values()):
            return None
        return max(since, self.counted_from) + self.patience
