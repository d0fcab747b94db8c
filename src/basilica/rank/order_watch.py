"""The watch of a rank's order in the run's keyspace: which attempt the control plane wants, or wants ended."""

from collections.abc import Callable

from basilica.rank.key_watch import watch_key
from basilica.rendezvous.orders import Order, load_order, order_key


class OrderWatch:
    """The newest order of one rank.

    `on_connected` is called when the keyspace answers anew and may be another one; `on_order` when the order changes.
    """

    def __init__(
        self, endpoint: str, rank: int, on_connected: Callable[[], None], on_order: Callable[[], None]
    ) -> None:
        self._endpoint, self._rank = endpoint, rank
        self._on_connected, self._on_order = on_connected, on_order
        self.order: Order | None = None
        self._handled = -1  # the newest attempt that was run, or was not this agent's to run

    async def run(self) -> None:
        await watch_key(self._endpoint, order_key(self._rank), self._take, self._on_connected)

    def next_attempt(self) -> Order | None:
        """Return the order of an attempt to run, once; None if there is none to run now."""
        order = self.order
        if order is None or not order.run or order.attempt <= self._handled:
            return None
        self._handled = order.attempt
        return order

    def ends(self, attempt: int) -> bool:
        """Whether the attempt is not wanted. An order for a later attempt ends this one: there must not be two."""
        order = self.order
        return order is not None and order.attempt >= attempt and (order.attempt > attempt or not order.run)

    def _take(self, text: str, _: bool) -> None:
        order = load_order(text)
        newest = self._handled if self.order is None else max(self._handled, self.order.attempt)
        if order is not None and order != self.order and order.attempt >= newest:
            self.order = order
            self._on_order()
