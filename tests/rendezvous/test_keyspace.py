"""The keyspace by itself: no sockets, no clock."""

from typing import Any

import pytest

from basilica.rendezvous.keyspace import HISTORY, SECOND, EtcdError, Event, Keyspace, Request, rfc3339
from basilica.rendezvous.request import parse_form, parse_request

NOW = 1_800_000_000 * SECOND


def put(keyspace: Keyspace, path: str, now: int = NOW, **options: Any) -> Event:
    return keyspace.write(Request(method="PUT", path=path, **options), now)


def get(keyspace: Keyspace, path: str, now: int = NOW, **options: Any) -> dict[str, Any]:
    return keyspace.get(Request(method="GET", path=path, **options), now).node


def test_indexes_start_where_those_of_a_new_etcd_start() -> None:
    keyspace = Keyspace()
    event = put(keyspace, "/a", value="1")
    assert event.created
    assert event.body() == {
        "action": "set",
        "node": {"key": "/a", "value": "1", "modifiedIndex": 4, "createdIndex": 4},
    }


def test_a_set_replaces_a_file_and_shows_the_one_before() -> None:
    keyspace = Keyspace()
    put(keyspace, "/a", value="1")
    event = put(keyspace, "/a", value="2")
    assert not event.created
    assert event.prev == {"key": "/a", "value": "1", "modifiedIndex": 4, "createdIndex": 4}
    assert event.node["createdIndex"] == 5


def test_compare_and_swap_tells_what_did_not_match() -> None:
    keyspace = Keyspace()
    put(keyspace, "/a", value="1")
    with pytest.raises(EtcdError) as caught:
        put(keyspace, "/a", value="2", prev_value="x", prev_index=9)
    assert caught.value.status == 412
    assert caught.value.body() == {
        "errorCode": 101,
        "message": "Compare failed",
        "cause": "[x != 1] [9 != 4]",
        "index": 4,
    }
    assert put(keyspace, "/a", value="2", prev_value="1", prev_index=4).action == "compareAndSwap"


def test_keys_in_order_are_named_by_the_index() -> None:
    keyspace = Keyspace()
    event = keyspace.write(Request(method="POST", path="/queue", value="job"), NOW)
    assert event.key == "/queue/00000000000000000004"


def test_hidden_keys_are_not_listed_and_can_be_read() -> None:
    keyspace = Keyspace()
    put(keyspace, "/a/_h", value="1")
    put(keyspace, "/a/b", value="2")
    assert [node["key"] for node in get(keyspace, "/a")["nodes"]] == ["/a/b"]
    assert get(keyspace, "/a/_h")["value"] == "1"


def test_keys_expire_oldest_deadline_first_and_directories_with_all_below_them() -> None:
    keyspace = Keyspace()
    put(keyspace, "/late", deadline=NOW + 2 * SECOND)
    put(keyspace, "/dir", dir=True, deadline=NOW + SECOND)
    put(keyspace, "/dir/mortal", deadline=NOW + 3 * SECOND)
    put(keyspace, "/forever")
    events = keyspace.sync(NOW + 5 * SECOND)
    assert [(event.action, event.key) for event in events] == [("expire", "/dir"), ("expire", "/late")]
    assert [node["key"] for node in get(keyspace, "/")["nodes"]] == ["/forever"]
    assert keyspace.next_deadline() is None


def test_an_update_without_a_ttl_makes_a_key_permanent() -> None:
    keyspace = Keyspace()
    put(keyspace, "/a", deadline=NOW + SECOND)
    put(keyspace, "/a", prev_exist=True, value="x")
    assert keyspace.next_deadline() is None


def test_many_keep_alives_leave_no_heap_of_old_deadlines() -> None:
    keyspace = Keyspace()
    put(keyspace, "/a", deadline=NOW)
    for beat in range(10_000):
        put(keyspace, "/a", prev_exist=True, refresh=True, deadline=NOW + beat)
    assert len(keyspace._deadlines) < 100
    assert keyspace.next_deadline() == NOW + 9_999


def test_a_refresh_wakes_nobody_and_a_change_does() -> None:
    keyspace = Keyspace()
    put(keyspace, "/a", value="1", deadline=NOW + SECOND)
    heard: list[Event] = []
    keyspace.watch("/a", heard.append)
    put(keyspace, "/a", refresh=True, prev_exist=True, deadline=NOW + 2 * SECOND)
    assert heard == []
    put(keyspace, "/a", value="2")
    assert [event.node["value"] for event in heard] == ["2"]
    assert keyspace.watching == 0


def test_who_waits_below_a_directory_hears_that_it_is_deleted() -> None:
    keyspace = Keyspace()
    put(keyspace, "/a/b/c", value="1")
    heard: list[Event] = []
    keyspace.watch("/a/b/c", heard.append)
    keyspace.write(Request(method="DELETE", path="/a", recursive=True), NOW)
    assert [event.key for event in heard] == ["/a"]


def test_a_watch_finds_what_has_happened_already() -> None:
    keyspace = Keyspace()
    put(keyspace, "/a", value="1")
    put(keyspace, "/a", value="2")
    _, past = keyspace.watch("/a", lambda _: None, since=4)
    assert past is not None
    assert past.node["value"] == "1"


def test_a_stream_hears_everything_until_it_ends() -> None:
    keyspace = Keyspace()
    heard: list[Event] = []
    watcher, _ = keyspace.watch("/", heard.append, recursive=True, stream=True)
    put(keyspace, "/a")
    put(keyspace, "/b/_hidden")
    put(keyspace, "/b/c")
    keyspace.unwatch(watcher)
    put(keyspace, "/d")
    assert [event.key for event in heard] == ["/a", "/b/c"]


def test_history_is_forgotten_after_a_thousand_events() -> None:
    keyspace = Keyspace()
    for _ in range(HISTORY + 10):
        put(keyspace, "/a")
    with pytest.raises(EtcdError, match="history has been cleared"):
        keyspace.watch("/a", lambda _: None, since=4)


def test_a_dump_holds_everything() -> None:
    keyspace = Keyspace()
    put(keyspace, "/a/b", value="1", deadline=NOW + SECOND)
    put(keyspace, "/é/_x", value="\udcff")
    put(keyspace, "/a/b", refresh=True, prev_exist=True, deadline=NOW + 2 * SECOND)
    keyspace.write(Request(method="DELETE", path="/é", recursive=True), NOW)
    again = Keyspace.load(keyspace.dump())
    assert again.dump() == keyspace.dump()
    assert [e.body() for e in again.sync(NOW + 9 * SECOND)] == [e.body() for e in keyspace.sync(NOW + 9 * SECOND)]


@pytest.mark.parametrize(
    ("form", "code"),
    [
        (b"ttl=soon", 202),
        (b"prevIndex=-1", 203),
        (b"prevIndex=" + b"9" * 5000, 203),
        (b"dir=maybe", 209),
        (b"prevValue=", 201),
        (b"refresh=true", 212),
        (b"refresh=true&ttl=1&value=x", 211),
        (b"wait=true", 209),
        (b"a;b", 210),
        (b"a=%x", 210),
    ],
)
def test_a_bad_form_is_refused_as_etcd_refuses_it(form: bytes, code: int) -> None:
    with pytest.raises(EtcdError) as caught:
        parse_request("PUT", "/a", parse_form(b"", form), NOW)
    assert (caught.value.code, caught.value.index) == (code, 0)


def test_the_body_stands_before_the_query() -> None:
    request = parse_request("PUT", "/a", parse_form(b"value=query&ttl=5", b"value=body"), NOW)
    assert (request.value, request.deadline) == ("body", NOW + 5 * SECOND)


def test_a_key_that_would_break_the_stack_is_refused() -> None:
    with pytest.raises(EtcdError, match="more than 400 parts"):
        parse_request("PUT", "/a" * 401, {}, NOW)
    keyspace = Keyspace()
    put(keyspace, "/a" * 400, value="deep")
    assert get(keyspace, "/", recursive=True)["dir"]
    Keyspace.load(keyspace.dump())
    keyspace.write(Request(method="DELETE", path="/a", recursive=True), NOW)


def test_moments_are_written_as_go_writes_them() -> None:
    assert rfc3339(NOW) == "2027-01-15T08:00:00Z"
    assert rfc3339(NOW + 120_000_000) == "2027-01-15T08:00:00.12Z"
