"""Our keyspace against real etcd 3.4: the same requests to both, the same answers from both.

`RENDEZVOUS_OPS=10000` sends that many operations instead of the usual 2,000, other ones each time. A failure tells the
whole sequence; `RENDEZVOUS_SHRINK=1` looks for the shortest one, which takes minutes.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tests.rendezvous.harness import Address, Answer, Client, Exchange, OurServer, etcd_in_memory

OPS = int(os.environ.get("RENDEZVOUS_OPS", "0"))
SHRINK = "RENDEZVOUS_SHRINK" in os.environ
PER_EXAMPLE = 40
EXPIRY_EXAMPLES = 12 if OPS else 3
LONG = "7200"

SAME_HEADERS = ("x-etcd-index", "content-type", "allow", "location", "x-raft-term", "x-content-type-options")
PRESENT_HEADERS = ("x-raft-index", "x-etcd-cluster-id")


@pytest.fixture(scope="module")
def etcd() -> Iterator[Address]:
    """Of our own: what other tests leave in theirs is in every listing of the root."""
    with etcd_in_memory() as address:
        yield address


prefixes = (f"/run{number:06d}" for number in count())


@dataclass(frozen=True)
class Op:
    """One request; indexes in it are relative to where the example starts."""

    method: str
    key: str
    query: dict[str, str] = field(default_factory=dict)
    body: dict[str, str] | None = None
    prev_index: int | None = None
    wait_index: int | None = None

    def target(self, prefix: str, start: int) -> str:
        query = dict(self.query)
        if self.prev_index is not None:
            query["prevIndex"] = str(max(start + self.prev_index, 0))
        if self.wait_index is not None:
            query["waitIndex"] = str(max(start + self.wait_index, 0))
        path = self.key if self.key.startswith("//root") else prefix + self.key
        path = path.removeprefix("//root")
        return f"/v2/keys{quote(path)}" + (f"?{urlencode(query)}" if query else "")


NAMES = st.sampled_from(["a", "b", "c", "ab", "_h", "a b", "é", "%"])
KEYS = st.lists(NAMES, min_size=0, max_size=3).map(lambda names: "".join(f"/{name}" for name in names))
DEEP_KEYS = st.lists(NAMES, min_size=1, max_size=3).map(lambda names: "".join(f"/{name}" for name in names))
VALUES = st.sampled_from(["", "x", "y", "1", "é & <b>", "a\nb", "z" * 300])
FLAGS = st.sampled_from(["true"] * 6 + ["false"] * 2 + ["1", "0", "T", "yes", ""])
TTLS = st.sampled_from([LONG] * 8 + ["100", "", "abc", "-1", "1.5", "18446744073709551616"])


def params(**choices: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, str]]:
    return st.fixed_dictionaries({}, optional=choices)


def some(strategy: st.SearchStrategy[Any], *, one_in: int) -> st.SearchStrategy[Any]:
    return st.integers(1, one_in).flatmap(lambda n: strategy if n == one_in else st.none())


@st.composite
def writes(draw: st.DrawFn) -> Op:
    method = draw(st.sampled_from(["PUT"] * 8 + ["POST", "POST", "DELETE", "DELETE", "DELETE"]))
    every: dict[str, str] = {}
    names: dict[str, tuple[st.SearchStrategy[str], int]] = {
        "value": (VALUES, 1 if method != "DELETE" else 9),
        "ttl": (TTLS, 4),
        "dir": (FLAGS, 5 if method != "DELETE" else 2),
        "prevExist": (FLAGS, 3),
        "prevValue": (VALUES, 5),
        "refresh": (FLAGS, 8),
        "recursive": (FLAGS, 9 if method != "DELETE" else 2),
        "noValueOnSuccess": (FLAGS, 20),
        "wait": (FLAGS, 60),
    }
    for name, (strategy, one_in) in names.items():
        value = draw(some(strategy, one_in=one_in))
        if value is not None:
            every[name] = value
    if draw(st.integers(0, 11)) == 0:  # a keep-alive
        every = {"ttl": LONG, "refresh": "true"} | ({"prevExist": "true"} if draw(st.booleans()) else {})
    in_query = {name for name in every if method == "DELETE" or draw(st.integers(0, 3)) == 0}
    query = {name: value for name, value in every.items() if name in in_query}
    body = {name: value for name, value in every.items() if name not in in_query}
    prev_index = draw(some(st.integers(-3, PER_EXAMPLE), one_in=6))
    key = draw(st.one_of(KEYS, DEEP_KEYS, DEEP_KEYS, st.just("//root/")))
    if key == "//root/" and method == "POST":
        key = ""
    return Op(method, key, query, None if method == "DELETE" else body, prev_index)


READS = st.builds(
    Op,
    st.sampled_from(["GET"] * 9 + ["HEAD", "PATCH"]),
    st.one_of(KEYS, st.just("//root"), st.just("//root/"), st.just("//a//b/../c")),
    params(recursive=FLAGS, sorted=FLAGS, quorum=st.sampled_from(["true", "false", "x"])),
)
WAIT_QUERY = st.fixed_dictionaries({"wait": st.just("true")}, optional={"recursive": FLAGS})
SINCE = st.one_of(st.none(), st.integers(1, PER_EXAMPLE))
WAITS = st.one_of(
    st.builds(Op, st.just("GET"), KEYS, WAIT_QUERY, wait_index=st.one_of(SINCE, st.integers(-1500, -900))),
    st.builds(Op, st.just("GET"), st.just("//root"), WAIT_QUERY, wait_index=SINCE),  # older events are not ours
)
OTHERS = st.sampled_from(
    ["restart", "compact", "/version", "/health", "/nope", "/v2/keysx", "/v2/keys/a?x=%zz", "/v2/keys/?a;b"]
)
STEPS = st.integers(0, 19).flatmap(lambda n: writes() if n < 11 else READS if n < 15 else WAITS if n < 19 else OTHERS)


class Pair:
    """Both servers in step, from one index on and below one prefix."""

    def __init__(self, etcd: Address, ours: OurServer) -> None:
        self.etcd, self.ours = Client(etcd), Client(ours.address)
        self.server = ours
        self.prefix = next(prefixes)
        self.start = int(self.etcd.ask("GET", "/v2/keys").headers["x-etcd-index"])
        ours.fresh(self.start)
        self.waits: list[tuple[str, Exchange, Exchange]] = []
        self.log: list[str] = []

    def do(self, op: Op) -> Answer:
        target = op.target(self.prefix, self.start)
        body = None if op.body is None else urlencode(op.body)
        return self.send(op.method, target, body, ordered=op.query.get("sorted") in ("true", "1", "T"))

    def send(self, method: str, target: str, body: str | None = None, *, ordered: bool = False) -> Answer:
        self.log.append(f"{method} {target} {body or ''}")
        theirs = self.etcd.ask(method, target, body)
        mine = self.ours.ask(method, target, body)
        self.compare(theirs, mine, ordered=ordered)
        return mine

    def wait(self, op: Op) -> None:
        target = op.target(self.prefix, self.start)
        self.log.append(f"GET {target} (waiting)")
        theirs = Exchange(self.etcd.address, "GET", target).wait_for_headers()
        mine = Exchange(self.ours.address, "GET", target).wait_for_headers()
        self.waits.append((self.log[-1], theirs, mine))

    def settle(self) -> None:
        """Each wait is answered by both, with the same event, or by none."""
        open_waits = []
        for line, theirs, mine in self.waits:
            if mine.answered(0.02):
                assert theirs.answered(2), f"only we answered {line}:\n{mine.answer()}\n{self.story()}"
                self.log.append(f"answer to {line}")
                self.compare(theirs.answer(), mine.answer())
                theirs.close()
                mine.close()
            else:
                open_waits.append((line, theirs, mine))
        for line, theirs, _ in open_waits:
            assert not theirs.answered(0.002), f"only etcd answered {line}:\n{theirs.answer()}\n{self.story()}"
        self.waits = open_waits

    def compare(self, theirs: Answer, mine: Answer, *, ordered: bool = False) -> None:
        assert mine.status == theirs.status, f"{theirs}\n{mine}\n{self.story()}"
        for name in SAME_HEADERS:
            assert mine.headers.get(name) == theirs.headers.get(name), f"{name}\n{theirs}\n{mine}\n{self.story()}"
        for name in PRESENT_HEADERS:
            assert (name in mine.headers) == (name in theirs.headers), f"{name}\n{theirs}\n{mine}\n{self.story()}"
        if theirs.headers.get("content-type") == "application/json" and theirs.raw:
            same = alike(normal(theirs.json, ordered=ordered), normal(mine.json, ordered=ordered))
            assert same, f"{theirs.json}\n{mine.json}\n{self.story()}"
        else:
            assert mine.raw == theirs.raw, self.story()

    def story(self) -> str:
        return f"start {self.start}\n" + "\n".join(self.log)

    def end(self) -> None:
        """Leave nothing in etcd that could move its index later."""
        for _, theirs, mine in self.waits:
            theirs.close()
            mine.close()
        self.etcd.ask("DELETE", f"/v2/keys{self.prefix}?recursive=true")
        self.etcd.close()
        self.ours.close()


def normal(value: Any, *, ordered: bool) -> Any:
    """Children in order of their keys where no order was asked for; a TTL of 0 is shown as none."""
    if isinstance(value, dict):
        shown = {name: normal(inner, ordered=ordered) for name, inner in value.items()}
        if "expiration" in shown:
            shown.setdefault("ttl", 0)
        if "nodes" in shown and not ordered:
            shown["nodes"].sort(key=lambda node: node["key"])
        return shown
    return [normal(inner, ordered=ordered) for inner in value] if isinstance(value, list) else value


def alike(theirs: Any, mine: Any, name: str = "") -> bool:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        return theirs.keys() == mine.keys() and all(alike(theirs[n], mine[n], n) for n in theirs)
    if isinstance(theirs, list) and isinstance(mine, list):
        return len(theirs) == len(mine) and all(map(alike, theirs, mine))
    if name == "expiration":
        both = [datetime.fromisoformat(moment) for moment in (theirs, mine)]
        return abs((both[0] - both[1]).total_seconds()) < 1
    if name == "ttl":
        return bool(abs(theirs - mine) <= 1)
    return bool(theirs == mine)


def explored(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=not OPS,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        phases=(Phase.generate,) if not SHRINK else tuple(Phase),
    )


@pytest.mark.timeout(60 + OPS // 5)
def test_any_sequence_of_requests_gets_the_same_answers_from_etcd(etcd: Address, ours: OurServer) -> None:
    done = 0

    @explored((OPS or 2000) // PER_EXAMPLE)
    @given(st.lists(STEPS, min_size=PER_EXAMPLE, max_size=PER_EXAMPLE))
    def explore(steps: list[Op | str]) -> None:
        nonlocal done
        pair = Pair(etcd, ours)
        try:
            for step in steps:
                done += 1
                if isinstance(step, Op):
                    if step.query.get("wait") == "true" and step.method == "GET":
                        pair.wait(step)
                    else:
                        pair.do(step)
                elif step.startswith("/"):
                    pair.send("GET", step)
                elif not pair.waits:
                    ours.restart() if step == "restart" else ours.compact()
            pair.settle()
        finally:
            pair.end()

    explore()
    assert done >= (OPS or 2000) * 0.9
    print(f"{done} operations, the same answers")


MORTALS = st.lists(
    st.one_of(
        st.builds(
            Op,
            st.just("PUT"),
            DEEP_KEYS,
            st.just({}),
            st.fixed_dictionaries(
                {"ttl": st.sampled_from(["1", "1", "2", LONG]), "value": st.sampled_from(["", "v"])},
                optional={"dir": st.just("true"), "prevExist": st.sampled_from(["true", "false"])},
            ),
        ),
        st.builds(
            Op,
            st.just("PUT"),
            DEEP_KEYS,
            st.just({}),
            st.fixed_dictionaries({"ttl": st.just("2"), "refresh": st.just("true"), "prevExist": st.just("true")}),
        ),
        st.builds(Op, st.just("PUT"), DEEP_KEYS, st.just({}), st.just({"value": "p"})),
        st.builds(Op, st.just("DELETE"), DEEP_KEYS, st.just({"recursive": "true"})),
        st.builds(
            Op,
            st.just("GET"),
            KEYS,
            st.fixed_dictionaries({"wait": st.just("true")}, optional={"recursive": st.just("true")}),
        ),
    ),
    min_size=20,
    max_size=30,
)


@pytest.mark.timeout(200)
def test_keys_expire_in_the_same_order_with_the_same_events(etcd: Address, ours: OurServer) -> None:
    @explored(EXPIRY_EXAMPLES)
    @given(MORTALS)
    def explore(ops: list[Op]) -> None:
        pair = Pair(etcd, ours)
        try:
            began = time.monotonic()
            for op in ops:
                pair.wait(op) if op.method == "GET" else pair.do(op)
            assume(time.monotonic() - began < 0.8)  # on a machine this slow nothing can be said
            time.sleep(3.0)
            pair.settle()
            pair.do(Op("GET", "", {"recursive": "true"}))
            now = int(pair.do(Op("GET", "//root")).headers["x-etcd-index"])
            for index in range(now - pair.start):
                target = Op("GET", "", {"wait": "true", "recursive": "true"}, wait_index=index + 1)
                pair.wait(target)
            pair.settle()
        finally:
            pair.end()

    explore()


def test_history_older_than_a_thousand_events_is_cleared(etcd: Address, ours: OurServer) -> None:
    pair = Pair(etcd, ours)
    try:
        for number in range(1005):
            pair.do(Op("PUT", "/a", {}, {"value": str(number)}))
        for index in (0, 1, 5, 6, 7, 1004, 1005):
            answer = Exchange(ours.address, "GET", f"/v2/keys{pair.prefix}/a?wait=true&waitIndex={pair.start + index}")
            assert answer.answer().status == (400 if index < 6 else 200)
            answer.close()
            pair.wait(Op("GET", "/a", {"wait": "true"}, wait_index=index))
        pair.settle()
        assert pair.waits == []
    finally:
        pair.end()


def test_what_is_odd_about_watching_the_past_is_the_same(etcd: Address, ours: OurServer) -> None:
    pair = Pair(etcd, ours)
    try:
        pair.do(Op("PUT", "/a", {}, {"dir": "true"}))
        pair.do(Op("DELETE", "/a", {"dir": "true"}))
        pair.do(Op("PUT", "/_hidden", {}, {"value": "1"}))
        pair.wait(Op("GET", "/ab", {"wait": "true"}, wait_index=1))
        pair.wait(Op("GET", "/a/b", {"wait": "true"}, wait_index=1))
        pair.wait(Op("GET", "", {"wait": "true", "recursive": "true"}, wait_index=3))
        pair.settle()
        assert pair.waits == []
    finally:
        pair.end()
