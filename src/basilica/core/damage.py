"""Facts about what was damaged or lost, as plain values: stores and runtimes find them, people read them."""

from dataclasses import dataclass

DAMAGED = "damaged"  # shown as the phase of a run whose record cannot be read; it is none that a run goes through


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedRun:
    """A run whose stored record cannot be read. Only what stands beside the record is known; `problem` names what is
    wrong with it, never what is in it."""

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
