"""The port of an object store: the operations that a round needs."""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from basilica.diloco.effects import Found, Range


class ObjectStore(Protocol):
    """Objects appear whole or not at all, and a create has exactly one winner. Methods may be called from any thread.

    Keys are relative paths. What cannot be done raises `OSError` or the store's own error; it never answers wrongly.
    """

    first_pause: float
    longest_pause: float
    """The pause between two polls of the store, in seconds: the less a poll costs, the shorter."""
    piece_bytes: int
    """How much is read at a time."""
    parallel: int
    """How many reads are worth having under way at once; 1 if they are as fast one by one."""

    def put(self, key: str, size: int, buffers: Iterable[memoryview]) -> None:
        """Write an object, whatever is there."""
        ...

    def put_if_absent(self, key: str, size: int, buffers: Iterable[memoryview]) -> bool:
        """Write an object unless there is one. True: it is ours that stands."""
        ...

    def read(self, range: Range) -> memoryview | None:
        """Bytes of an object, fewer where it ends sooner; None if there is no such object."""
        ...

    def list(self, prefix: str, after: str = "") -> tuple[Found, ...]:
        """All objects whose key begins with the prefix and comes behind `after`, in order."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; what is gone already is fine."""
        ...

    def wait_for_change(self, prefix: str, seconds: float) -> None:
        """Wait; return sooner after a change under the prefix, if this store can notify."""
        ...


@runtime_checkable
class LeavesDrafts(Protocol):
    """A store in which a writer that is killed may leave something that no listing shows."""

    def leftovers(self, prefix: str, older_than: float) -> tuple[Found, ...]:
        """What was left below a prefix, not written to for so many seconds; `delete` takes its keys."""
        ...
