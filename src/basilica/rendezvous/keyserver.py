"""The keys API of one keyspace, answered as by etcd 3.4, within a quota. Everything but the socket."""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable

from basilica.machine.clocks import steady_ns
from basilica.rendezvous.client import HEARTBEATS
from basilica.rendezvous.http import Call, LongReply, Reply, text_error
from basilica.rendezvous.journal import Journal
from basilica.rendezvous.keyspace import INTERNAL, OVER_QUOTA, SECOND, EtcdError, Event, Request
from basilica.rendezvous.names import HEARD
from basilica.rendezvous.presence import AGENT, Changes, Presence
from basilica.rendezvous.quota import UNSHARED, Quota, why_not_wait, why_not_write
from basilica.rendezvous.request import parse_form, parse_request

log = logging.getLogger(__name__)

KEYS = "/v2/keys"
METHODS = ("HEAD", "GET", "PUT", "POST", "DELETE")
VERSION = {"etcdserver": "3.4.23", "etcdcluster": "3.4.0"}  # the version whose behaviour clients may expect
RAFT_TERM = "2"
JSON = ("Content-Type", "application/json")


class KeyspaceServer:
    """Answers calls from the journal's keyspace; `start` before, `stop` after."""

    def __init__(
        self,
        name: str,
        journal: Journal,
        clock: Callable[[], int] = steady_ns,
        written: Callable[[], None] = lambda: None,
        quota: Quota = UNSHARED,
    ) -> None:
        """`written` is called after each write, which is then in the journal and not yet on the disk."""
        self.journal = journal
        self._written = written
        self.keyspace = journal.keyspace
        self._clock, self._quota = clock, quota
        self._cluster = ("X-Etcd-Cluster-Id", f"{int(hashlib.sha256(name.encode()).hexdigest()[:16], 16):x}")
        self._timer: asyncio.TimerHandle | None = None
        self._timer_for = 0
        self._presence = Presence()
        self._presence_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to expire keys, first those that were due while the service was down."""
        self._expire(self._clock())
        with contextlib.suppress(EtcdError):  # no such key: no agent was heard from before
            self.keyspace.get(Request(method="GET", path=HEARD), self._clock())
            self._write(Request(method="DELETE", path=HEARD, recursive=True, dir=True))
        self._arm()

    def stop(self) -> None:
        for timer in (self._timer, self._presence_timer):
            if timer is not None:
                timer.cancel()
        self.journal.close()

    def handle(self, call: Call) -> Reply | LongReply:
        path = call.path
        if path == KEYS or path.startswith(KEYS + "/"):
            if call.method not in METHODS:
                return _not_allowed(*METHODS)
            try:
                return self._keys(call)
            except EtcdError as error:
                headers = (self._cluster, JSON, ("X-Etcd-Index", str(error.index)))
                return Reply(error.status, json_line(error.body()), headers)
        if path.startswith(HEARTBEATS + "/"):
            return self._heartbeat(call) if call.method == "PUT" else _not_allowed("PUT")
        if path == "/v2/machines":
            if call.method not in ("GET", "HEAD"):
                return _not_allowed("GET", "HEAD")
            # The address that the client used is one that it can reach.
            return _text(f"http://{call.headers.get('host', '127.0.0.1')}")
        if path in ("/version", "/health"):
            if call.method != "GET":
                return _not_allowed("GET")
            if path == "/health":
                return _text('{"health":"true"}')
            return Reply(200, json_line(VERSION)[:-1], (JSON,))
        return text_error(404, "404 page not found")

    def _keys(self, call: Call) -> Reply | LongReply:
        now = self._clock()
        form = parse_form(call.query, call.form_body)
        request = parse_request(call.method, "/" + call.path[len(KEYS) :].strip("/"), form, now)
        self._expire(now)
        if call.method in ("GET", "HEAD"):
            if request.wait and not request.quorum:
                return self._watch(request)
            event = self.keyspace.get(request, now)
        else:
            self._within_quota(why_not_write(self._quota, self.keyspace, request))
            event = self._write(request, now)
        short = request.no_value and event.action in ("set", "compareAndSwap", "create", "update")
        body = {"action": event.action} if short else event.body()
        return Reply(201 if event.created else 200, json_line(body), self._headers(event.etcd_index))

    def _write(self, request: Request, now: int | None = None) -> Event:
        now = self._clock() if now is None else now
        try:
            self.journal.record(request, now)
        except OSError as error:
            raise EtcdError(INTERNAL, f"the journal cannot be written: {error}") from error
        self._written()
        event = self.keyspace.write(request, now)
        self._arm()
        return event

    # -- heartbeats

    def _heartbeat(self, call: Call) -> Reply:
        agent, form = call.path.removeprefix(HEARTBEATS + "/"), parse_form(call.query, call.form_body)
        try:
            every = float(form["every"][0])
            gap = float(form["gap"][0]) if "gap" in form else None
            if not (AGENT.fullmatch(agent) and every > 0 and (gap is None or 0 <= gap < math.inf)):
                raise ValueError
        except (KeyError, ValueError):
            return text_error(400, "a heartbeat names an agent, and after how many seconds the next one comes")
        self._publish(self._presence.heard(agent, every, gap, time.monotonic()))
        return Reply(204)

    def _publish(self, changes: Changes) -> None:
        """Write the changes. A change that the journal refuses is lost: its readers wait longer, and nothing worse."""
        for key, value in changes.items():
            try:
                if value is None:
                    self._write(Request(method="DELETE", path=key))
                else:
                    self._write(Request(method="PUT", path=key, value=value))
            except EtcdError as error:
                log.error("%s is not published: %s", key, error)
        if self._presence_timer is not None and not changes:
            return  # a heartbeat that is no news costs the same for any number of agents
        moment = self._presence.next_due()
        if moment is not None and (self._presence_timer is None or moment < self._presence_timer.when()):
            if self._presence_timer is not None:
                self._presence_timer.cancel()
            wait = max(moment - time.monotonic(), 0.0) + 0.001
            self._presence_timer = asyncio.get_running_loop().call_later(wait, self._publish_silences)

    def _publish_silences(self) -> None:
        self._presence_timer = None
        self._publish(self._presence.fallen_silent(time.monotonic()))

    # -- waiting

    def _watch(self, request: Request) -> LongReply:
        def deliver(event: Event) -> None:
            reply.chunk(json_line(event.body()), last=not request.stream)

        self._within_quota(why_not_wait(self._quota, self.keyspace))
        watcher, past = self.keyspace.watch(
            request.path, deliver, recursive=request.recursive, stream=request.stream, since=request.wait_index
        )
        reply = LongReply(self._headers(watcher.start_index), lambda: self.keyspace.unwatch(watcher))
        if past is not None:
            deliver(past)
        return reply

    def _within_quota(self, why_not: str | None) -> None:
        if why_not is not None:
            raise EtcdError(OVER_QUOTA, why_not, self.keyspace.index)

    def _headers(self, index: int) -> tuple[tuple[str, str], ...]:
        raft = ("X-Raft-Index", str(self.keyspace.raft_index))
        return (self._cluster, JSON, ("X-Etcd-Index", str(index)), raft, ("X-Raft-Term", RAFT_TERM))

    def _expire(self, now: int) -> None:
        deadline = self.keyspace.next_deadline()
        if deadline is None or deadline > now:
            return
        try:
            self.journal.record_sync(now)
            self._written()
        except OSError:
            log.exception("expired keys stay: the journal in %s cannot be written", self.journal.folder)
            return
        self.keyspace.sync(now)

    def _arm(self) -> None:
        """Set the timer to the next deadline; if that has moved later, the wake-up finds out."""
        deadline = self.keyspace.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_for <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        wait = min(max(deadline - self._clock(), 0) / SECOND + 0.001, 60.0)
        self._timer_for = deadline
        self._timer = asyncio.get_running_loop().call_later(wait, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._expire(self._clock())
        self._arm()


def _not_allowed(*methods: str) -> Reply:
    return text_error(405, "Method Not Allowed", ("Allow", ",".join(methods)))


def _text(text: str) -> Reply:
    return Reply(200, text.encode(), (("Content-Type", "text/plain; charset=utf-8"),))


_LONE = re.compile("[\ud800-\udfff]")


def json_line(value: object) -> bytes:
    """Return a line of JSON. Bytes that were no UTF-8 are shown as U+FFFD, one for each, as Go does."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _LONE.sub("\ufffd", text).encode()
