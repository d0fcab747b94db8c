"""The rules that drive torchelastic's rendezvous: from its state and the number of agents wanted to the next write.

Pure. torchrun with `--rdzv-backend=etcd` keeps one JSON value, `active_version`, that its agents change by
compare-and-swap:

    (absent) -> setup -> joinable -> frozen -> final -> closed
                  agents join     confirm    train     an agent that ended shut it

They wait out a last call in `joinable` and keep-alives in `final`, because they do not know how many of them will come.
We do. So we freeze a round once all have joined, make agents of a round that is too large meet again, open the next
round once all wait for it or when a member does not confirm, and reopen a round shut while the run goes on. Steps that
agents take at once by themselves stay with them: they make the first round, fill the last seat of a full one, and
destroy a round whose members are gone. A round with one member left they would destroy as well, and that member, which
checks only for waiting agents, would never learn of it: so departed members are removed from such a round.

The shape of the JSON is private to torch. A value of any other shape than the expected is not touched, and agents go
on as they would without us.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

FROZEN_TTL_S = 10  # as torch does: a round that nobody confirms dissolves, even without us
CONFIRM_S = 3.0  # agents confirm one after the other, each within some 0.1 s; one that did not is gone
NOTICE_S = 0.5  # agents check every monitor interval, 0.1 s by default; this is ample for the last of them

# Agents rewrite the whole object and keep unknown fields, so our field survives their writes and our restarts.
OURS = "basilica"


class Status(StrEnum):
    """The status of a round."""

    SETUP = "setup"
    JOINABLE = "joinable"
    FROZEN = "frozen"
    FINAL = "final"
    CLOSED = "closed"


_JOINABLE = frozenset({"status", "version", "participants"})
_FROZEN = _JOINABLE | {"keep_alives"}
_FINAL = _FROZEN | {"num_workers_waiting"}
_SHAPES: Mapping[Status, tuple[frozenset[str], ...]] = {
    Status.SETUP: (frozenset({"status"}),),
    Status.JOINABLE: (_JOINABLE,),
    Status.FROZEN: (_FROZEN,),
    Status.FINAL: (_FINAL,),
    Status.CLOSED: (frozenset({"status"}), _JOINABLE, _FROZEN, _FINAL),  # the former value with another status
}


class UnknownShape(ValueError):
    """The value has another shape than the known torch versions write."""


@dataclass(frozen=True, slots=True)
class Round:
    """One value of `active_version`.

    `waiting` counts the agents that wait for the next round. `nudged`: torch's own count has one more, which we put
    there to make the agents meet again. `formed_for` is the target that we opened this round for, None where agents
    opened it.
    """

    fields: Mapping[str, Any]
    status: Status
    participants: int = 0
    waiting: int = 0
    nudged: bool = False
    formed_for: int | None = None

    @property
    def was_final(self) -> bool:
        return "num_workers_waiting" in self.fields

    @property
    def pending(self) -> tuple[str, int] | None:
        """The pending step, as a value that changes with each progress; None if the round waits for nothing."""
        if self.status is Status.FROZEN:
            return self.fields["version"], len(self.fields["keep_alives"])
        return (self.fields["version"], -1) if self.ends else None

    @property
    def ends(self) -> bool:
        """Whether its members will meet again at their next check."""
        return self.status is Status.FINAL and (self.waiting > 0 or self.nudged)


@dataclass(frozen=True, slots=True)
class Swap:
    """Replace the value that was found; `ttl` in seconds, None for a value that stays."""

    value: str
    ttl: int | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """Replace the value that was found by `first_value` of a fresh version."""


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Read again after a change, or after `seconds`; nothing is to be written before."""

    seconds: float


Step = Swap | Open | LookAgain | None


def parse_round(text: str) -> Round:
    """Parse a round; `UnknownShape` for any value that torch 2.13 would not have written."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise UnknownShape("is no JSON") from None
    if not isinstance(fields, dict):
        raise UnknownShape("is no JSON object")
    status = fields.get("status")
    if status not in tuple(Status):
        raise UnknownShape(f"has the status {status!r}")
    status = Status(status)
    if fields.keys() - {OURS} not in _SHAPES[status]:
        raise UnknownShape(f"is {status} and has the fields {sorted(fields)}")
    ours = _ours(fields.get(OURS, {}))
    version, seats = fields.get("version", "0"), fields.get("participants", [])
    if not (isinstance(version, str) and version.isascii() and version.isdigit()):
        raise UnknownShape(f"has the version {version!r}")
    if seats != list(range(len(seats) if isinstance(seats, list) else 0)):
        raise UnknownShape("has participants that are not numbered in the order of their coming")
    keep_alives, waiting = fields.get("keep_alives", []), fields.get("num_workers_waiting", 0)
    if not isinstance(keep_alives, list) or not all(isinstance(key, str) for key in keep_alives):
        raise UnknownShape(f"has the keep-alives {keep_alives!r}")
    if len(keep_alives) > len(seats):
        raise UnknownShape("has more keep-alives than participants")
    nudged = ours.get("nudged", 0)
    if not is_count(waiting) or waiting < nudged:
        raise UnknownShape(f"has {waiting!r} workers waiting")
    return Round(fields, status, len(seats), waiting - nudged, bool(nudged), ours.get("target"))


def decide(found: Round, target: int, pending_for: float) -> Step:
    """Return the next step towards a round of `target` agents.

    `pending_for`: for how many seconds, as far as we know, the same step has been pending: agents could see that others
    wait, or none confirmed.
    """
    if target < 1:
        return None
    match found.status:
        case Status.JOINABLE if found.participants >= target:
            return Swap(_changed(found, status=Status.FROZEN, keep_alives=[]), FROZEN_TTL_S)
        case Status.FROZEN:
            return Open() if pending_for >= CONFIRM_S else LookAgain(CONFIRM_S - pending_for)
        case Status.CLOSED:
            # A round that trained may be training still: its members must be able to see who waits.
            return Swap(_changed(found, status=Status.FINAL)) if found.was_final else Open()
        case Status.FINAL:
            return _decide_final(found, target, pending_for)
        case _:
            return None


def _decide_final(found: Round, target: int, pending_for: float) -> Step:
    if found.waiting >= max(target, found.participants):
        return Open()
    if found.waiting >= target:
        # Fewer than there were. An agent that has not looked yet would never learn of a next round once this one is
        # gone, and surplus agents may have been quicker than it.
        return Open() if pending_for >= NOTICE_S else LookAgain(NOTICE_S - pending_for)
    too_large = found.participants > target and found.formed_for != target  # else surplus agents came back: no use
    if too_large and not found.nudged and found.waiting == 0:
        torchs_count = found.fields["num_workers_waiting"] + 1
        return Swap(_changed(found, num_workers_waiting=torchs_count, ours={"nudged": 1}))
    return None


def without_the_gone(found: Round, alive: Collection[str]) -> Swap | None:
    """Return a final round without the keep-alives that are not among those `alive`; None if all are, or none is."""
    if found.status is not Status.FINAL:
        return None
    kept = [key for key in found.fields["keep_alives"] if key in alive]
    if not kept or kept == found.fields["keep_alives"]:
        return None
    return Swap(_changed(found, keep_alives=kept))


def first_value(version: int, target: int) -> str:
    """Return a fresh round that agents can join."""
    fields = {"status": Status.JOINABLE, "version": str(version), "participants": [], OURS: {"target": target}}
    return json.dumps(fields)


def _changed(found: Round, ours: Mapping[str, int] | None = None, **changes: object) -> str:
    fields = {**found.fields, **changes}
    if ours is not None:
        fields[OURS] = {**found.fields.get(OURS, {}), **ours}
    return json.dumps(fields)


def _ours(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or not value.keys() <= {"nudged", "target"}:
        raise UnknownShape(f"has {value!r} as {OURS!r}")
    if not all(is_count(number) for number in value.values()) or value.get("nudged", 0) > 1:
        raise UnknownShape(f"has {value!r} as {OURS!r}")
    return value


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse_target(text: str) -> int:
    """Return the number of agents that the control plane wants; `UnknownShape` if the text has none."""
    try:
        target = json.loads(text)["target"]
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        raise UnknownShape(f"says no target: {text[:200]!r}") from None
    if not is_count(target):
        raise UnknownShape(f"says the target {target!r}")
    return int(target)
