"""Facts of damage and loss, as plain values: stores and runtimes find them, people read them."""

from dataclasses import dataclass

DAMAGED = "damaged"  # shown as the phase of a run whose record cannot be read; it is none that a run goes through


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedRun:
    """A run whose stored record cannot be read. Only the fields beside the record are known; `problem` names the fault
    of the record, never its content."""

    instance: str
    user: str
    namespace: str
    name: str
    target: int
    created_at: float
    version: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One thing that is wrong with the server as a whole: the fact, and what to do about it."""

    kind: str
    message: str
    remedy: str
