"""The parts of a replica: the model's parameters and buffers, its processes, its fragments, and its options."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from basilica.diloco.allreduce import RoundStats
from basilica.diloco.outer import Array, OuterSGD, Schedule, fingerprint
from basilica.diloco.writes import Writes


class Checksum(NamedTuple):
    """Of a parameter that is not trained."""

    name: str
    digest: str


class Values(Protocol):
    """The trained parameters of a model, by number, and its buffers, as this process holds them."""

    @property
    def sizes(self) -> Sequence[int]: ...

    def read(self, index: int) -> Array:
        """A copy in this machine's memory, in float32 or wider."""
        ...

    def write(self, index: int, value: Array) -> None: ...

    def seen(self, index: int, agreed: Array) -> Array:
        """These numbers as the model has them: rounded to its own type. Not to be changed."""
        ...

    def buffers(self) -> list[Array]:
        """Copies of all buffers, floats in float32 or wider."""
        ...

    def write_buffers(self, values: Sequence[Array]) -> None: ...

    def frozen(self) -> list[Checksum]:
        """Of the parameters that are not trained, in their order."""
        ...


class Team(Protocol):
    """The processes of one replica. The leader alone uses the store, and broadcasts to the others."""

    leads: bool

    def tell(self, words: Sequence[int]) -> list[int]:
        """The leader's words, in all of them."""
        ...

    def share(self, arrays: Sequence[Array]) -> None:
        """The leader's numbers, put into everybody's arrays."""
        ...


class Alone:
    """A replica of one process, or one whose processes each hold a shard of their own."""

    leads = True

    def tell(self, words: Sequence[int]) -> list[int]:
        return list(words)

    def share(self, arrays: Sequence[Array]) -> None:
        pass


@dataclass(slots=True)
class Given:
    """A part that this replica has given, and that is not applied yet.

    `before`: the all-reduce as it stood then; `seen`: what this replica had seen then.
    """

    deltas: list[Array]
    weight: float
    before: Mapping[str, Any] | None
    buffers: list[Array] = field(default_factory=list)
    seen: float = 0.0
    means: "Future[list[Array]] | None" = None
    decided: "Decided | None" = None
    """The result of its round. Once it is here the all-reduce is not called again, whatever fails afterwards."""


@dataclass(slots=True)
class Decided:
    """The means of a round, and how far the outer step with them has come."""

    means: list[Array]
    stats: RoundStats
    outer: Writes = field(default_factory=Writes)


@dataclass(slots=True)
class Fragment:
    """A run of parameters that is synchronized together, and its agreed values.

    The last one has the model's buffers too, whatever modules they belong to.
    """

    name: str
    indexes: range
    agreed: list[Array]
    buffers: list[Array] = field(default_factory=list)
    velocity: list[Array] | None = None
    round: int = 0
    samples: float = 0.0
    digest: str = ""
    counted: float = 0.0
    """What this replica had seen when it last gave a part."""
    given: Given | None = None

    def take(
        self, parameters: Sequence[Array], velocity: Sequence[Array] | None, buffers: Sequence[Array] = ()
    ) -> None:
        for mine, theirs in zip([*self.agreed, *self.buffers], [*parameters, *buffers], strict=True):
            np.copyto(mine, theirs)
        self.velocity = None if velocity is None else [np.array(v) for v in velocity]
        self.prove()

    def prove(self) -> None:
        """Make the fingerprint of what was agreed on."""
        self.digest = fingerprint(self.agreed, self.velocity, self.buffers)

    def shared(self) -> list[Array]:
        """The memory of all that was agreed on. Buffers as bytes: not every backend can send every type."""
        return [*self.agreed, *(buffer.reshape(-1).view(np.uint8) for buffer in self.buffers)]


@dataclass(slots=True, kw_only=True)
class Options:
    """The options of training; all replicas of a run have the same."""

    sync_every: int
    outer: OuterSGD = field(default_factory=OuterSGD)
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    checkpoint_every: int = 1
    part: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix must be from 0 to 1, not {self.mix}")
        if self.checkpoint_every < 0:
            raise ValueError(f"checkpoint_every must be 0 (never) or more, not {self.checkpoint_every}")

    @property
    def settings(self) -> dict[str, Any]:
        """Return the options as they are recorded, and compared between replicas."""
        return {
            "sync_every": int(self.sync_every),
            "fragments": int(self.fragments),
            "delay": int(self.delay),
            "mix": float(self.mix),
            "outer_lr": float(self.outer.lr),
            "outer_momentum": float(self.outer.momentum),
            "nesterov": bool(self.outer.nesterov),
            "outer_warmup": float(self.outer.warmup),
            "checkpoint_every": int(self.checkpoint_every),
        }

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.sync_every, self.fragments, self.delay)
