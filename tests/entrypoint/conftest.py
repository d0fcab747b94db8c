"""The rendezvous that the gate asks."""

from tests.rendezvous.conftest import ours

__all__ = ["ours"]
