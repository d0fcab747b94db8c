"""A copy of part of a keyspace that follows it: reads cost nothing, and a change arrives within milliseconds."""

import asyncio
from collections.abc import Callable

from basilica.rendezvous.client import Answer, KeysClient
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.keyspace import EVENT_INDEX_CLEARED, WATCHER_CLEARED
from basilica.rendezvous.retries import AGAIN_FIRST_S, next_pause

_REMOVALS = ("delete", "expire", "compareAndDelete")


class KeysMirror:
    """The values below `root`, by key. `changed` is called with the key that changed, None for all of them.

    `fresh` is true while the copy follows; before `known` nothing has been read yet. A keyspace that was lost and begun
    anew is read anew, and keys that it lost are dropped here.
    """

    def __init__(self, endpoint: str, root: str, changed: Callable[[str | None], None]) -> None:
        self._endpoint, self._root, self._changed = endpoint, root, changed
        self.values: dict[str, str] = {}
        self.known = self.fresh = False

    async def run(self) -> None:
        """Follow until cancelled; a keyspace that does not answer is polled."""
        keys, pause = KeysClient(self._endpoint), AGAIN_FIRST_S
        try:
            while True:
                try:
                    await self._follow(keys)
                    pause = AGAIN_FIRST_S
                except NoAnswer:
                    if self.fresh:
                        self.fresh, pause = False, AGAIN_FIRST_S
                        self._changed(None)
                    await asyncio.sleep(pause)
                    pause = next_pause(pause)
        finally:
            await keys.close()

    async def _follow(self, keys: KeysClient) -> None:
        """Read everything, then follow; return when the history does not go back far enough."""
        found = await keys.get(self._root, recursive=True)
        if not (found.ok or found.status == 404) or found.index == 0:
            raise NoAnswer(f"{found.status} {found.body}")
        self.values, self.known, self.fresh = found.leaves(), True, True
        self._changed(None)
        index = found.index
        while True:
            event = await keys.wait(self._root, index + 1, recursive=True)
            index = event.node.get("modifiedIndex", 0)
            if event.body.get("errorCode") in (WATCHER_CLEARED, EVENT_INDEX_CLEARED):
                return
            if not event.ok or not isinstance(index, int):  # an immediate retry is of no use
                raise NoAnswer(f"{event.status} {event.body}")
            self._apply(event)

    def _apply(self, event: Answer) -> None:
        key = str(event.node.get("key", ""))
        if event.body.get("action") in _REMOVALS:
            for gone in [name for name in self.values if name == key or name.startswith(f"{key}/")]:
                del self.values[gone]
        else:
            self.values |= event.leaves()
        self._changed(key)
