"""The watch of one key of the run's keyspace, over lost connections and lost keyspaces."""

import contextlib
from collections.abc import Callable

from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.retries import opened, tries


async def watch_key(
    endpoint: str, key: str, on_value: Callable[[str, bool], None], on_connected: Callable[[], None] = lambda: None
) -> None:
    """Follow the key until cancelled. A missing key has the value "".

    `on_value` is called with each value, and with whether it was just written: the first one after a connection may be
    of any age. `on_connected` is called before that, when the keyspace answers anew and may be another one.
    """
    async with opened(endpoint) as keys:
        async for again in tries():
            with contextlib.suppress(NoAnswer):
                found = await keys.get(key)
                if found.index == 0:
                    continue
                on_connected()
                index, written_now = found.index, False
                while found.ok or found.status == 404:
                    on_value(str(found.node.get("value", "")), written_now)
                    found = await keys.wait(key, index + 1)
                    index, written_now = int(found.node.get("modifiedIndex", index)), True
                again.at_once = True  # the history does not go back so far: read the key again
