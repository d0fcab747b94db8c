"""Changes of several arrays that go on where they were interrupted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Writes:
    """Changes of several arrays, one after the other. Repeated after an error, they go on where they were.

    A value is computed, kept, and then written: so writing it once more changes nothing.
    """

    done: int = 0
    _ready: "tuple[int, object] | None" = None

    @property
    def begun(self) -> bool:
        return self.done > 0 or self._ready is not None

    def run(self, count: int, compute: Callable[[int], T], write: Callable[[int, T], None]) -> None:
        while self.done < count:
            ready: tuple[int, T] | None = self._ready  # type: ignore[assignment]  # what `compute` has made
            if ready is None or ready[0] != self.done:
                self._ready = ready = (self.done, compute(self.done))
            write(ready[0], ready[1])
            self.done += 1
        self._ready = None
