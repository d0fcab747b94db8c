"""The budget of restarts of a torchrun agent that we launch: falls that a lost peer caused cost nothing.

`torch_agent` follows the workers and says of which kind the end of each was. As its text, the text of this file travels
to ranks that have no basilica: it needs the standard library and torch alone, and knows no module of ours.
"""

from __future__ import annotations

import json
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

OWN, AS_ECHO, DONE = "own", "echo", "done"  # the kinds, and where an agent has its workers, in `torch_agent`
WORKERS = "_basilica_workers"


def count_own_failures_only() -> None:
    """Let an agent restart its workers without a cost when they fell because a peer had gone.

    torch counts each fall of a worker. A rank that is lost, or drained, makes the workers of all others fall, so the
    agents' default budget of 0 would end them all. An agent whose workers fell on their own ends at once (or pays a
    restart, where it has one). An agent whose workers name a lost connection meets the others first, and learns there
    whether an agent has gone or has paid.
    """
    try:
        from torch.distributed.elastic.agent.server.api import RunResult, WorkerState  # noqa: PLC0415
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent  # noqa: PLC0415
    except ImportError:  # another torch has it elsewhere
        return
    agents: Any = LocalElasticAgent
    names = ("_monitor_workers", "_rendezvous", "_assign_worker_ranks", "_restart_workers")
    if not all(hasattr(agents, name) for name in names):
        return
    look, meet, introduce = agents._monitor_workers, agents._rendezvous, agents._assign_worker_ranks
    me = os.environ.get("BASILICA_RANK", "0") + "/" + os.environ.get("BASILICA_ATTEMPT", "0")
    fall = ["", 0.0]  # the kind and the time of our workers' last fall
    members: dict[str, Any] = {}  # of the round that trains: how the workers of each fell in the one before

    def monitor(self: Any, group: Any) -> Any:
        result = look(self, group)
        if result.state not in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return result
        fall[:] = how_it_fell(getattr(getattr(self, WORKERS, None), "fell", {}).values()), time.time()
        if fall[0] == OWN or group.group_world_size == 1:
            return result
        try:
            self._restart_workers(group)
        except BudgetSpent:
            return result
        return RunResult(state=WorkerState.HEALTHY)

    def meet_and_count(self: Any, group: Any) -> None:
        before, echo = set(members), fall[0] == AS_ECHO and group.group_world_size != 1
        meet(self, group)
        fall[:] = "", 0.0
        if echo and pays(me, before, members):
            if self._remaining_restarts <= 0:
                raise BudgetSpent
            self._remaining_restarts -= 1

    def introduce_with_fall(self: Any, store: Any, group_rank: int, group_size: int, spec: Any) -> Any:
        own = [f"basilica/agents/{n}" for n in range(group_size)]
        store.set(own[group_rank], json.dumps([me, *fall]))
        if group_rank == 0:  # one agent reads the entries of all: with each reading each, the cost would be quadratic
            if group_size > 1:
                store.multi_get([f"torchelastic/role_info/{n}" for n in range(1, group_size)])
            said = [key for key in own if store.check([key])] if not store.check(own) else own
            store.set("basilica/round", json.dumps([json.loads(word) for word in store.multi_get(said)]))
        workers = introduce(self, store, group_rank, group_size, spec)
        members.clear()
        if store.check(["basilica/round"]):
            members.update({name: (kind, at) for name, kind, at in json.loads(store.get("basilica/round"))})
        return workers

    agents._monitor_workers = monitor
    agents._rendezvous = meet_and_count
    agents._assign_worker_ranks = introduce_with_fall


class BudgetSpent(Exception):
    """The workers fell more often than their budget allows."""


def how_it_fell(kinds: Iterable[str]) -> str:
    """Return whether workers fell on their own, or as they do when a peer is gone, from the kind of each one's end.

    Workers that torch stopped have none. Without a worker that fell, it is the agent's own: torch gave one up.
    """
    return AS_ECHO if {*kinds} - {DONE} == {AS_ECHO} else OWN


def pays(me: str, before: Any, members: Any) -> bool:
    """Return whether the fall of our workers, which looks like an echo, is counted as our own.

    `before` and `members` are the agents of the round in which they fell and of the next. With the same agents in both,
    and none that fell on its own, no other agent is to blame: the first of those that fell pays.
    """
    if set(before) != set(members) or any(kind == OWN for kind, _ in members.values()):
        return False
    return bool(min((at, name) for name, (kind, at) in members.items() if kind)[1] == me)
