"""The kernel's count of processes that it killed for want of memory, of one control group."""

from basilica.core.ends import memory_kills_in

BYTES_MAX = 1 << 16


def memory_kills(path: str | None) -> int:
    """The kills so far; 0 where nothing counts them."""
    if path is None:
        return 0
    try:
        with open(path, "rb") as file:  # the kernel's own: no rank can put anything in its place
            return memory_kills_in(file.read(BYTES_MAX).decode())
    except OSError:
        return 0
