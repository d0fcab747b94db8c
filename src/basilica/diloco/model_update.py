"""The part of a step that is each process's own: once the replicas have agreed, the model is written.

A step that fails in it is repeated, and goes on where it was: the replicas do not agree a second time, and no array is
moved or mixed twice.
"""

from dataclasses import dataclass, field

from basilica.diloco.allreduce import RoundStats
from basilica.diloco.fragments import Fragment, Values
from basilica.diloco.outer import Array, mixed
from basilica.diloco.writes import Writes


@dataclass(slots=True, kw_only=True)
class Landing:
    """The rest of a step once the replicas have agreed."""

    word: int
    """The leader's broadcast to its processes."""
    step: int
    """The step that this replica is at afterwards."""
    fragments: list[Fragment]
    mix: float = 0.0
    round: int | None = None
    """How many rounds of the fragment are applied then; None for states that were taken from the bucket."""
    samples: float = 0.0
    stats: RoundStats | None = None
    """Of the round that was applied, where this process leads its replica."""
    told: bool = False
    _writes: Writes = field(default_factory=Writes)

    def count(self) -> None:
        """Make the applied round one of the fragment's."""
        if self.round is not None:
            (fragment,) = self.fragments
            fragment.samples, fragment.round, fragment.given = self.samples, self.round, None

    def write(self, values: Values) -> None:
        """Put what was agreed on into the model, with a share of its own where that is wanted."""
        places = [
            (index, agreed)
            for fragment in self.fragments
            for index, agreed in zip(fragment.indexes, fragment.agreed, strict=True)
        ]

        def compute(place: int) -> Array:
            index, agreed = places[place]
            return mixed(agreed, values.read(index), self.mix) if self.mix else agreed

        self._writes.run(len(places), compute, lambda place, value: values.write(places[place][0], value))
        for fragment in self.fragments:
            if fragment.buffers:
                values.write_buffers(fragment.buffers)
