"""The etcd v2 keyspace: a tree of keys, an index, a history of 1,000 events, and watchers.

Pure and deterministic: no clock, no I/O. `now` and deadlines are integers, nanoseconds since the epoch. The same
requests at the same times give the same tree, the same indexes and the same history: a log of requests is a log of
states.

Behaves as etcd 3.4 does where that is odd, too: an update without a TTL makes a key permanent, a directory's own
`modifiedIndex` stays when its TTL is updated, a refresh enters the history and wakes nobody, a watch in the past
sees hidden keys, and the deletion of a directory `/fo` when it watches `/foo`.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

HISTORY = 1000
HISTORY_BYTES = 16 << 20  # large values shorten the history: the oldest events are dropped sooner
NODE_BYTES = 400  # about the memory of a key besides its name and its value
FIRST_INDEX = 3  # the index of a new one-member etcd after it has registered itself
SECOND = 1_000_000_000
YEAR_2000 = 946_684_800 * SECOND

Action = Literal["get", "create", "set", "update", "delete", "compareAndSwap", "compareAndDelete", "expire"]

KEY_NOT_FOUND, COMPARE_FAILED, NOT_A_FILE, NOT_A_DIRECTORY = 100, 101, 102, 104
KEY_EXISTS, ROOT_READ_ONLY, DIRECTORY_NOT_EMPTY = 105, 107, 108
PREV_VALUE_REQUIRED, TTL_NAN, INDEX_NAN, INVALID_FIELD = 201, 202, 203, 209
INVALID_FORM, REFRESH_VALUE, REFRESH_TTL_REQUIRED = 210, 211, 212
INTERNAL, WATCHER_CLEARED, EVENT_INDEX_CLEARED = 300, 400, 401
UNAUTHORIZED = 110
OVER_QUOTA = 130  # ours: etcd's v2 API has no quota

MESSAGES = {
    KEY_NOT_FOUND: "Key not found",
    COMPARE_FAILED: "Compare failed",
    NOT_A_FILE: "Not a file",
    NOT_A_DIRECTORY: "Not a directory",
    KEY_EXISTS: "Key already exists",
    ROOT_READ_ONLY: "Root is read only",
    DIRECTORY_NOT_EMPTY: "Directory not empty",
    PREV_VALUE_REQUIRED: "PrevValue is Required in POST form",
    TTL_NAN: "The given TTL in POST form is not a number",
    INDEX_NAN: "The given index in POST form is not a number",
    INVALID_FIELD: "Invalid field",
    INVALID_FORM: "Invalid POST form",
    REFRESH_VALUE: "Value provided on refresh",
    REFRESH_TTL_REQUIRED: "A TTL must be provided on refresh",
    UNAUTHORIZED: "The request requires user authentication",
    OVER_QUOTA: "Quota of the keyspace exceeded",
    INTERNAL: "Raft Internal Error",
    WATCHER_CLEARED: "watcher is cleared due to etcd recovery",
    EVENT_INDEX_CLEARED: "The event in requested index is outdated and cleared",
}
STATUS = {
    KEY_NOT_FOUND: 404,
    NOT_A_FILE: 403,
    DIRECTORY_NOT_EMPTY: 403,
    COMPARE_FAILED: 412,
    KEY_EXISTS: 412,
    UNAUTHORIZED: 401,
    OVER_QUOTA: 507,
    INTERNAL: 500,
}


class EtcdError(Exception):
    """A request that etcd answers with an error; `index` is 0 where the request itself is at fault."""

    def __init__(self, code: int, cause: str, index: int = 0) -> None:
        super().__init__(code, cause, index)
        self.code, self.cause, self.index = code, cause, index

    def __str__(self) -> str:
        return f"{self.code} {MESSAGES[self.code]} ({self.cause})"

    @property
    def status(self) -> int:
        return STATUS.get(self.code, 400)

    def body(self) -> dict[str, Any]:
        cause = {"cause": self.cause} if self.cause else {}
        return {"errorCode": self.code, "message": MESSAGES[self.code], **cause, "index": self.index}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of the keys API, parsed. `path` is clean and absolute; an empty `prev_value` or `prev_index` is none."""

    method: str
    path: str
    value: str = ""
    dir: bool = False
    recursive: bool = False
    sorted: bool = False
    prev_exist: bool | None = None
    prev_value: str = ""
    prev_index: int = 0
    refresh: bool = False
    deadline: int | None = None
    wait: bool = False
    wait_index: int = 0
    stream: bool = False
    quorum: bool = False
    no_value: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """A change of one key, rendered when it happened. `etcd_index` is the keyspace's index at the answer."""

    action: Action
    key: str
    index: int
    node: dict[str, Any]
    prev: dict[str, Any] | None = None
    refresh: bool = False
    etcd_index: int = 0

    @property
    def weight(self) -> int:
        """About its size in memory."""
        values = (shown.get("value", "") for shown in (self.node, self.prev) if shown is not None)
        return 2 * NODE_BYTES + sum(map(text_weight, values))

    @property
    def created(self) -> bool:
        return self.action == "create" or (self.action == "set" and self.prev is None)

    def body(self) -> dict[str, Any]:
        prev = {"prevNode": self.prev} if self.prev is not None else {}
        return {"action": self.action, "node": self.node, **prev}


@dataclass(slots=True, eq=False)
class Watcher:
    """A waiting request at `path`; `deliver` is called with each event, once unless `stream`."""

    path: str
    recursive: bool
    stream: bool
    since: int
    start_index: int
    deliver: Callable[[Event], None]

    def wants(self, event: Event, at: str, *, deleted: bool) -> bool:
        original = event.key == at
        if not original and _hidden(at, event.key):
            return False
        return (self.recursive or original or deleted) and event.index >= self.since


class Node:
    """A file (`children` is None) or a directory. `ticket` is its entry among the deadlines, 0 for none."""

    __slots__ = ("children", "created", "deadline", "modified", "parent", "path", "ticket", "value")

    def __init__(self, path: str, parent: "Node | None", index: int, value: str | None, deadline: int | None) -> None:
        self.path, self.parent = path, parent
        self.created = self.modified = index
        self.value = value or ""
        self.children: dict[str, Node] | None = {} if value is None else None
        self.deadline = deadline
        self.ticket = 0

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def weight(self) -> int:
        """About its size in memory, without its children."""
        return weight(self.path, self.value)

    def child_path(self, name: str) -> str:
        return f"{'' if self.parent is None else self.path}/{name}"


def weight(path: str, value: str) -> int:
    """Return about the size of a key in memory."""
    return NODE_BYTES + text_weight(path) + text_weight(value)


def text_weight(text: str) -> int:
    """Return about the size of a text in memory: Python needs up to four bytes a letter as soon as one is not ASCII."""
    return len(text) * (1 if text.isascii() else 4)


class Keyspace:
    """One etcd's worth of keys. `write`, `sync` and nothing else change it.

    `keys` counts files and directories, `weight` is about their size in memory.
    """

    def __init__(self, index: int = FIRST_INDEX) -> None:
        self.index = index
        self.raft_index = index + 1
        self._root = Node("/", None, 0, None, None)
        self._events: list[Event | None] = [None] * HISTORY
        self._deadlines: list[tuple[int, int, Node]] = []
        self._tickets = 0
        self._mortal = 0
        self._watchers: dict[str, dict[Watcher, None]] = {}
        self.watching = 0
        self.keys = self.weight = 0
        self._cleared = 0  # the last event dropped for its size
        self._history_weight = 0

    # -- reading

    def get(self, request: Request, now: int) -> Event:
        node = self._find(request.path)
        shown = _render(node, now, depth=2 if request.recursive else 1, ordered=request.sorted)
        return Event("get", node.path, node.modified, shown, etcd_index=self.index)

    def watch(
        self,
        path: str,
        deliver: Callable[[Event], None],
        *,
        recursive: bool = False,
        stream: bool = False,
        since: int = 0,
    ) -> tuple[Watcher, Event | None]:
        """Wait for the first event at `path` with an index of at least `since` (0: the next one).

        An event that is in the history already is returned at once and the watcher is not kept, not even for a stream.
        """
        watcher = Watcher(path, recursive, stream, since or self.index + 1, self.index, deliver)
        past = self._scan(path, recursive, watcher.since)
        if past is None:
            self._watchers.setdefault(path, {})[watcher] = None
            self.watching += 1
        return watcher, past

    def growth(self, path: str, value: str) -> tuple[int, int]:
        """Return how many keys and how much weight a file at `path` with this value would add, with the directories
        above it.
        """
        node, at = self._root, ""
        steps = path[1:].split("/")
        for number, step in enumerate(steps):
            child = None if node.children is None else node.children.get(step)
            if child is None:
                added = 0
                for name in steps[number:]:
                    at = f"{at}/{name}"
                    added += weight(at, "")
                return len(steps) - number, added + text_weight(value)
            node, at = child, child.path
        return 0, text_weight(value) - text_weight(node.value)

    def unwatch(self, watcher: Watcher) -> None:
        here = self._watchers.get(watcher.path)
        if here is not None and watcher in here:
            del here[watcher]
            self.watching -= 1
            if not here:
                del self._watchers[watcher.path]

    # -- writing

    def write(self, request: Request, now: int) -> Event:
        """Apply a PUT, POST or DELETE; an `EtcdError` means that nothing has changed."""
        self.raft_index += 1
        compared = request.prev_index > 0 or request.prev_value != ""
        match request.method:
            case "PUT" if request.prev_exist is False:
                return self._create(request, now, unique=False)
            case "PUT" if compared:
                return self._swap(request, now)
            case "PUT" if request.prev_exist:
                return self._update(request, now)
            case "PUT":
                return self._set(request, now)
            case "POST":
                return self._create(request, now, unique=True)
            case "DELETE" if compared:
                return self._compare_and_delete(request, now)
            case "DELETE":
                return self._delete(request, now)
            case _:
                raise ValueError(f"{request.method} is not a write")

    def next_deadline(self) -> int | None:
        """Return when the next key expires."""
        while self._deadlines and self._deadlines[0][2].ticket != self._deadlines[0][1]:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def sync(self, now: int) -> list[Event]:
        """Remove the expired keys, oldest deadline first, and notify the watchers."""
        self.raft_index += 1
        events = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            node = self._deadlines[0][2]
            self.index += 1
            shown = _indexed(node.path, self.index, node.created, dir=node.children is not None)
            event = Event("expire", node.path, self.index, shown, _render(node, now, depth=0), etcd_index=self.index)
            self._remove(node, event)
            self._publish(event)
            events.append(event)
        return events

    def _set(self, request: Request, now: int) -> Event:
        value, prev = request.value, None
        try:
            node = self._find(request.path)
        except EtcdError as error:
            if error.code != KEY_NOT_FOUND or request.refresh:
                raise
        else:
            value = node.value if request.refresh else value
            prev = _render(node, now, depth=0)
        return self._insert(request, now, action="set", path=request.path, value=value, prev=prev)

    def _create(self, request: Request, now: int, *, unique: bool) -> Event:
        path = request.path
        if unique:
            path = f"{path.rstrip('/')}/{self.index + 1:020d}"
        return self._insert(request, now, action="create", path=path, value=request.value, prev=None)

    def _insert(
        self,
        request: Request,
        now: int,
        *,
        action: Literal["create", "set"],
        path: str,
        value: str,
        prev: dict[str, Any] | None,
    ) -> Event:
        """Put a new node at `path`: in place of a file if this is a set, which has read `prev`."""
        self._guard_root(path)
        parent = self._root
        *above, name = path[1:].split("/")
        index = self.index + 1
        for step in above:
            assert parent.children is not None
            child = parent.children.get(step)
            if child is None:
                child = self._attach(Node(parent.child_path(step), parent, index, None, None))
            elif child.children is None:
                raise EtcdError(NOT_A_DIRECTORY, child.path, self.index)
            parent = child
        assert parent.children is not None
        old = parent.children.get(name)
        if old is not None:
            if action == "create":
                raise EtcdError(KEY_EXISTS, path, self.index)
            if old.children is not None:
                raise EtcdError(NOT_A_FILE, path, self.index)
            self._remove(old, None)
        deadline = request.deadline
        if deadline is not None and deadline < YEAR_2000:
            deadline = None
        node = self._attach(Node(path, parent, index, None if request.dir else value, deadline))
        self._add_deadline(node)
        self.index = index
        refresh = request.refresh and action == "set"
        return self._publish(Event(action, path, index, _render(node, now, depth=0), prev, refresh, index))

    def _update(self, request: Request, now: int) -> Event:
        self._guard_root(request.path)
        node = self._find(request.path)
        if node.children is not None and request.value:
            raise EtcdError(NOT_A_FILE, request.path, self.index)
        return self._overwrite(node, request, now, "update")

    def _swap(self, request: Request, now: int) -> Event:
        self._guard_root(request.path)
        node = self._find(request.path)
        self._compare(node, request)
        return self._overwrite(node, request, now, "compareAndSwap")

    def _overwrite(self, node: Node, request: Request, now: int, action: Action) -> Event:
        prev = _render(node, now, depth=0)
        self.index += 1
        if node.children is None:
            node.modified = self.index
            if not request.refresh:
                self.weight += text_weight(request.value) - text_weight(node.value)
                node.value = request.value
        self._drop_deadline(node)
        node.deadline = request.deadline
        self._add_deadline(node)
        shown = {**_render(node, now, depth=0), "modifiedIndex": self.index}
        return self._publish(Event(action, node.path, self.index, shown, prev, request.refresh, self.index))

    def _delete(self, request: Request, now: int) -> Event:
        self._guard_root(request.path)
        node = self._find(request.path)
        if node.children is not None:
            if not (request.dir or request.recursive):
                raise EtcdError(NOT_A_FILE, node.path, self.index)
            if node.children and not request.recursive:
                raise EtcdError(DIRECTORY_NOT_EMPTY, node.path, self.index)
        return self._delete_node(node, now, "delete")

    def _compare_and_delete(self, request: Request, now: int) -> Event:
        node = self._find(request.path)
        self._compare(node, request)
        return self._delete_node(node, now, "compareAndDelete")

    def _delete_node(self, node: Node, now: int, action: Action) -> Event:
        self.index += 1
        shown = _indexed(node.path, self.index, node.created, dir=node.children is not None)
        event = Event(action, node.path, self.index, shown, _render(node, now, depth=0), etcd_index=self.index)
        self._remove(node, event)
        return self._publish(event)

    def _compare(self, node: Node, request: Request) -> None:
        if node.children is not None:
            raise EtcdError(NOT_A_FILE, "" if node is self._root else node.path, self.index)
        value = request.prev_value in ("", node.value)
        index = request.prev_index in (0, node.modified)
        causes = [] if value else [f"[{request.prev_value} != {node.value}]"]
        causes += [] if index else [f"[{request.prev_index} != {node.modified}]"]
        if causes:
            raise EtcdError(COMPARE_FAILED, " ".join(causes), self.index)

    def _guard_root(self, path: str) -> None:
        if path == "/":
            raise EtcdError(ROOT_READ_ONLY, "/", self.index)

    def _find(self, path: str) -> Node:
        node = self._root
        for step in path[1:].split("/") if path != "/" else ():
            if node.children is None:
                raise EtcdError(NOT_A_DIRECTORY, node.path, self.index)
            child = node.children.get(step)
            if child is None:
                raise EtcdError(KEY_NOT_FOUND, node.child_path(step), self.index)
            node = child
        return node

    def _attach(self, node: Node) -> Node:
        """Put a node into the tree, below its parent."""
        assert node.parent is not None
        assert node.parent.children is not None
        node.parent.children[node.name] = node
        self.keys += 1
        self.weight += node.weight
        return node

    def _remove(self, node: Node, event: Event | None) -> None:
        """Take a node and all below it out of the tree; watchers of any of them get `event`."""
        for child in list(node.children.values()) if node.children else ():
            self._remove(child, event)
        if node.parent is not None and node.parent.children is not None:
            del node.parent.children[node.name]
            self.keys -= 1
            self.weight -= node.weight
        self._drop_deadline(node)
        if event is not None:
            self._notify(event, node.path, deleted=True)

    # -- deadlines

    def _add_deadline(self, node: Node) -> None:
        if node.deadline is None:
            return
        self._tickets += 1
        self._mortal += 1
        node.ticket = self._tickets
        heapq.heappush(self._deadlines, (node.deadline, node.ticket, node))
        if len(self._deadlines) > 64 + 2 * self._mortal:  # keep-alives leave their old deadlines behind
            self._deadlines = [entry for entry in self._deadlines if entry[2].ticket == entry[1]]
            heapq.heapify(self._deadlines)

    def _drop_deadline(self, node: Node) -> None:
        if node.ticket:
            node.ticket = 0
            self._mortal -= 1

    # -- events

    def _publish(self, event: Event) -> Event:
        self._remember(event)
        if not event.refresh and self._watchers:
            self._notify(event, "/", deleted=False)
            for end, letter in enumerate(event.key):
                if letter == "/" and end:
                    self._notify(event, event.key[:end], deleted=False)
            self._notify(event, event.key, deleted=False)
        return event

    def _remember(self, event: Event) -> None:
        before = self._events[event.index % HISTORY]
        self._events[event.index % HISTORY] = event
        self._history_weight += event.weight - (before.weight if before is not None else 0)
        oldest = max(self._cleared + 1, event.index - HISTORY + 1)
        while self._history_weight > HISTORY_BYTES and oldest < event.index:
            old = self._events[oldest % HISTORY]
            if old is not None:
                self._events[oldest % HISTORY] = None
                self._history_weight -= old.weight
            self._cleared = oldest
            oldest += 1

    def _notify(self, event: Event, at: str, *, deleted: bool) -> None:
        here = self._watchers.get(at)
        if here is None:
            return
        for watcher in [w for w in here if w.wants(event, at, deleted=deleted)]:
            if not watcher.stream:
                self.unwatch(watcher)
            watcher.deliver(event)

    def _scan(self, path: str, recursive: bool, since: int) -> Event | None:
        start = max(self.index - HISTORY + 1, self._cleared + 1, min(self.index, 1))
        if since < start:
            cause = f"the requested history has been cleared [{start}/{since}]"
            raise EtcdError(EVENT_INDEX_CLEARED, cause, self.index)
        below = path if path == "/" else path + "/"
        for index in range(since, self.index + 1):
            event = self._events[index % HISTORY]
            if event is None or event.refresh:
                continue
            if event.key == path or (recursive and event.key.startswith(below)):
                return event
            removed = event.action in ("delete", "expire") and event.prev is not None and event.prev.get("dir", False)
            if removed and path.startswith(event.key):
                return event
        return None

    # -- snapshots

    def dump(self) -> dict[str, Any]:
        """Return everything but the watchers, as JSON values."""
        past = range(max(self.index - HISTORY + 1, 0), self.index + 1)
        return {
            "index": self.index,
            "raft_index": self.raft_index,
            "tickets": self._tickets,
            "cleared": self._cleared,
            "nodes": [
                [n.path, n.created, n.modified, n.deadline, n.ticket, n.value if n.children is None else None]
                for n in _below(self._root)
            ],
            "history": [
                [e.action, e.key, e.index, e.node, e.prev, e.refresh]
                for e in (self._events[i % HISTORY] for i in past)
                if e is not None
            ],
        }

    @classmethod
    def load(cls, state: dict[str, Any]) -> "Keyspace":
        self = cls(state["index"])
        self.raft_index, self._tickets = state["raft_index"], state["tickets"]
        self._cleared = state.get("cleared", 0)
        for path, created, modified, deadline, ticket, value in state["nodes"]:
            parent = self._find(path.rpartition("/")[0] or "/")
            assert parent.children is not None
            node = Node(path, parent, created, value, deadline)
            node.modified, node.ticket = modified, ticket
            self._attach(node)
            if ticket:
                self._mortal += 1
                self._deadlines.append((deadline, ticket, node))
        heapq.heapify(self._deadlines)
        for action, key, index, shown, prev, refresh in state["history"]:
            self._remember(Event(action, key, index, shown, prev, refresh, index))
        return self


def _below(node: Node) -> Iterator[Node]:
    for child in (node.children or {}).values():
        yield child
        yield from _below(child)


def _indexed(path: str, modified: int, created: int, *, dir: bool) -> dict[str, Any]:
    kind = {"dir": True} if dir else {}
    return {"key": path, **kind, "modifiedIndex": modified, "createdIndex": created}


def _render(node: Node, now: int, *, depth: int, ordered: bool = False) -> dict[str, Any]:
    """Return a node as etcd shows it: alone (`depth` 0), with its children (1), with all below it (2)."""
    shown: dict[str, Any] = {} if node.parent is None else {"key": node.path}
    if node.children is None:
        shown["value"] = node.value
    else:
        shown["dir"] = True
    if node.deadline is not None:
        shown["expiration"] = rfc3339(node.deadline)
        left = node.deadline - now
        seconds = -(-left // SECOND)  # towards zero once it is late, as in Go
        if seconds:
            shown["ttl"] = seconds
    if depth and node.children:
        children = [c for c in node.children.values() if not c.name.startswith("_")]
        if ordered:
            children.sort(key=lambda c: c.path.encode(errors="surrogateescape"))
        if children:
            below = depth if depth == 2 else 0
            shown["nodes"] = [_render(c, now, depth=below, ordered=ordered) for c in children]
    if node.modified:
        shown |= {"modifiedIndex": node.modified, "createdIndex": node.created}
    return shown


def _hidden(watched: str, key: str) -> bool:
    """Whether a name below `watched` on the way to `key` starts with an underscore."""
    if len(watched) > len(key):
        return False
    return "/_" in "/" + key[len(watched) :].lstrip("/")


def rfc3339(moment: int) -> str:
    """Format a moment as Go does: UTC, nanoseconds, no trailing zeros."""
    seconds, nanos = divmod(moment, SECOND)
    fraction = f".{nanos:09d}".rstrip("0") if nanos else ""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}{fraction}Z"
