"""The quota of one keyspace in the process that many of them share. Pure."""

from dataclasses import dataclass

from basilica.rendezvous.keyspace import Keyspace, Request
from basilica.rendezvous.names import ROOT

RESERVE = 4  # our own keys may take a quarter more than all others: a full keyspace still takes orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """`weight` is about the memory of all keys and values; `buffered` the bytes that came and are not answered, or not
    sent.
    """

    keys: int = 65_536
    weight: int = 256 << 20
    value_bytes: int = 1 << 20
    waits: int = 16_384
    connections: int = 16_384
    buffered: int = 64 << 20

    @property
    def body_bytes(self) -> int:
        """The longest body that can hold a value: a form has three bytes for each byte that it escapes."""
        return 3 * self.value_bytes + (64 << 10)


UNSHARED = Quota()  # of a process that has one keyspace, such as a run's own pod
SHARED_WEIGHT = 64 << 20  # for each of many


def why_not_write(quota: Quota, keyspace: Keyspace, request: Request) -> str | None:
    """Return why the keyspace cannot take the write, as the text of the error; None if it can."""
    if request.method == "DELETE":
        return None
    size = len(request.value.encode(errors="surrogateescape"))
    if size > quota.value_bytes:
        return f"the value has {size} bytes, and a value may have {quota.value_bytes}"
    path = f"{request.path.rstrip('/')}/{keyspace.index + 1:020d}" if request.method == "POST" else request.path
    keys, weight = keyspace.growth(path, request.value) if not request.refresh else (0, 0)
    ours = request.path == ROOT or request.path.startswith(f"{ROOT}/")
    extra = 1 + 1 / RESERVE if ours else 1
    if keys > 0 and keyspace.keys + keys > quota.keys * extra:
        return f"the keyspace has {keyspace.keys} keys, and may have {quota.keys}: delete some"
    if weight > 0 and keyspace.weight + weight > quota.weight * extra:
        return f"the keyspace takes {keyspace.weight} bytes, and may take {quota.weight}: delete some keys"
    return None


def why_not_wait(quota: Quota, keyspace: Keyspace) -> str | None:
    if keyspace.watching >= quota.waits:
        return f"{keyspace.watching} requests wait for keys of this keyspace, and {quota.waits} may"
    return None
