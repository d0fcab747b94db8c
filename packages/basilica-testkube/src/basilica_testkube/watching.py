"""Lists and watches."""

import asyncio
import base64
import json
import random
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice

from basilica_testkube.errors import ApiError, bad_request, expired_list
from basilica_testkube.http import Hangup, Reply
from basilica_testkube.routes import Route
from basilica_testkube.selectors import Match, selector
from basilica_testkube.store import Change, Cursor, Store, encode
from basilica_testkube.values import Json, meta

_BOOKMARK_S = 60.0
_LISTS_KEPT = 100


@dataclass(slots=True, eq=False)
class OpenWatch:
    """A watch that is being served; the server can end it."""

    resource: str
    cursor: Cursor
    cut: bool = False
    last_words: ApiError | None = None

    def end(self, error: ApiError | None = None) -> None:
        """Hang up, or say an error first and end in order."""
        self.cut, self.last_words = error is None, error
        self.cursor.ready.set()


def _number(query: dict[str, str], name: str) -> int:
    text = query.get(name, "")
    if text and not text.isdecimal():
        raise bad_request(f'Invalid value: "{text}": {name} must be a non-negative integer')
    return int(text or 0)


class Listings:
    """Answers lists, whole or in pages, and watches."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pages: OrderedDict[str, tuple[list[Json], int]] = OrderedDict()
        self.watches: set[OpenWatch] = set()
        self.bookmark_every = _BOOKMARK_S

    def forget_pages(self) -> None:
        self._pages.clear()

    def page(self, route: Route, query: dict[str, str], *, only_metadata: bool = False) -> Reply:
        """The objects of a kind; with `limit`, a page of a snapshot that the next page continues."""
        kind = route.kind
        self._store.check_revision(_number(query, "resourceVersion"))
        limit, token = _number(query, "limit"), query.get("continue", "")
        match = self._match(route, query)
        if token:
            if token not in self._pages:
                raise expired_list()
            items, revision = self._pages.pop(token)
        else:
            items, revision = self._store.items(kind, route.namespace), self._store.revision
            items = items if match is None else [obj for obj in items if match(obj)]
        metadata: Json = {"resourceVersion": str(revision)}
        if limit and len(items) > limit:
            items, rest = items[:limit], items[limit:]
            metadata["continue"] = self._remember(rest, revision, items[-1])
            if match is None:
                metadata["remainingItemCount"] = len(rest)
        named = (f"{kind.kind}List", kind.api_version)
        if only_metadata:
            named, items = ("PartialObjectMetadataList", "meta.k8s.io/v1"), [{"metadata": meta(obj)} for obj in items]
        listed = {"kind": named[0], "apiVersion": named[1], "metadata": metadata, "items": items}
        return Reply(200, encode(listed))

    def _remember(self, rest: list[Json], revision: int, last: Json) -> str:
        said = {"v": "meta.k8s.io/v1", "rv": revision, "start": meta(last)["name"], "n": random.getrandbits(32)}
        token = base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")
        self._pages[token] = (rest, revision)
        while len(self._pages) > _LISTS_KEPT:
            self._pages.popitem(last=False)
        return token

    def _match(self, route: Route, query: dict[str, str]) -> Match | None:
        fields = query.get("fieldSelector", "")
        if route.name:  # a watch of one object
            fields = ",".join(part for part in (fields, f"metadata.name={route.name}") if part)
        return selector(route.kind, query.get("labelSelector", ""), fields)

    # -- watches

    def watch(self, route: Route, query: dict[str, str]) -> Reply:
        """A stream of changes after a resource version, or of all objects and then their changes."""
        match = self._match(route, query)
        revision = _number(query, "resourceVersion")
        self._store.check_revision(revision)
        whole = revision == 0 or query.get("sendInitialEvents", "").lower() == "true"
        try:
            cursor = self._store.log(route.kind).open(self._store.revision if whole else revision)
        except ApiError as error:
            return Reply(200, _only(_line("ERROR", encode(error.body))))
        initial = self._store.items(route.kind, route.namespace) if whole else []
        return Reply(200, self._events(route, query, OpenWatch(route.kind.plural, cursor), initial, match))

    async def _events(
        self, route: Route, query: dict[str, str], watch: OpenWatch, initial: list[Json], match: Match | None
    ) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        bookmarks = query.get("allowWatchBookmarks", "").lower() in ("1", "true")
        end = loop.time() + (_number(query, "timeoutSeconds") or random.uniform(1800, 3600))
        next_bookmark = loop.time() + self.bookmark_every
        log = self._store.log(route.kind)
        log.cursors.add(watch.cursor)
        self.watches.add(watch)
        try:
            for obj in initial:
                if match is None or match(obj):
                    yield _line("ADDED", encode(obj))
            if bookmarks and query.get("sendInitialEvents", "").lower() == "true":
                yield self._bookmark(route, initial_end=True)
            while True:
                if watch.cut:
                    raise Hangup
                if watch.last_words is not None:
                    yield _line("ERROR", encode(watch.last_words.body))
                    return
                changes = iter(watch.cursor.take())
                while some := list(islice(changes, 200)):
                    yield b"".join(_seen(change, route.namespace, match) for change in some)
                if watch.cursor.pending or watch.cut or watch.last_words is not None:
                    continue
                now = loop.time()
                if now >= end:
                    if bookmarks:
                        yield self._bookmark(route)
                    return
                if bookmarks and now >= next_bookmark:
                    next_bookmark = now + self.bookmark_every
                    yield self._bookmark(route)
                wait = min(end, next_bookmark if bookmarks else end) - loop.time()
                try:
                    async with asyncio.timeout(max(0.0, wait)):
                        await watch.cursor.ready.wait()
                except TimeoutError:
                    continue
        finally:
            log.cursors.discard(watch.cursor)
            self.watches.discard(watch)

    def _bookmark(self, route: Route, *, initial_end: bool = False) -> bytes:
        metadata: Json = {"resourceVersion": str(self._store.revision), "creationTimestamp": None}
        if initial_end:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        return _line(
            "BOOKMARK", encode({"kind": route.kind.kind, "apiVersion": route.kind.api_version, "metadata": metadata})
        )


def _line(kind: str, obj: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), obj)


async def _only(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


def _seen(change: Change, namespace: str, match: Match | None) -> bytes:
    """A change as a watch with a selector sees it: an object comes into view, changes, and leaves it."""
    if namespace and meta(change.obj).get("namespace") != namespace:
        return b""
    if match is None:
        return _line(change.type, change.encoded)
    before = change.old is not None and match(change.old)
    now = change.type != "DELETED" and match(change.obj)
    if before and now:
        return _line("MODIFIED", change.encoded)
    if now:
        return _line("ADDED", change.encoded)
    return _line("DELETED", change.encoded) if before else b""
