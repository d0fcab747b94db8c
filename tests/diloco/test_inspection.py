"""What a prefix tells of its run, and what of it can go."""

import json

import pytest

from basilica.diloco.bucket import Bucket
from basilica.diloco.effects import Range
from basilica.diloco.errors import RoundError
from basilica.diloco.inspection import collect_garbage, find_runs, garbage, inspect_run
from basilica.diloco.stores import ObjectStore, open_store
from tests.diloco.gang import fresh_uri, gang
from tests.diloco.test_run import H, ends, train


def test_a_run_is_told_from_its_prefix() -> None:
    uri = fresh_uri()
    gang(2, lambda allreduce: train(allreduce, 5 * H), uri)
    assert find_runs(open_store(uri)) == ["run"]
    found = inspect_run(Bucket(open_store(uri)))
    assert found.record is not None
    assert (found.record.world_size, found.record.settings["sync_every"]) == (2, H)
    assert [entry["round"] for entry in found.rounds] == list(range(5))
    assert found.rounds[-1]["weights"] == {"0": 6.0, "1": 6.0}
    assert found.rounds[-1]["samples"] == 60.0
    assert [(m.rank, m.incarnation, m.outcome) for m in found.members] == [(0, 0, "finished"), (1, 0, "finished")]
    (agreed,) = found.agreed
    assert (agreed.round, agreed.samples, agreed.size) == (5, 60.0, 2 * 17 * 4)
    assert agreed.digest == found.rounds[-1]["digest"]
    assert agreed.chain == found.rounds[-1]["chain"]
    assert found.unaccounted == []
    assert found.sizes["states"] > agreed.size


def test_the_same_run_has_the_same_fingerprints() -> None:
    uris = [fresh_uri(), fresh_uri()]
    for uri in uris:
        gang(2, lambda allreduce: train(allreduce, 3 * H), uri)
    first, second = (inspect_run(Bucket(open_store(uri))).agreed for uri in uris)
    assert first == second


def test_what_no_replica_needs_is_removed_and_the_run_goes_on() -> None:
    whole = gang(2, lambda allreduce: ends(allreduce, 9 * H))
    uri = fresh_uri()
    gang(2, lambda allreduce: train(allreduce, 6 * H), uri)
    bucket = Bucket(open_store(uri))
    found = garbage(bucket)
    assert found.keys
    assert all("/states/" in key for key in found.keys), "the last rounds may still be read by somebody who is late"
    collect_garbage(bucket, found)
    stopped = garbage(bucket, unfinished=True)
    assert any("/rounds/" in key for key in stopped.keys)
    assert not any("manifest" in key for key in stopped.keys)
    collect_garbage(bucket, stopped)
    assert garbage(bucket, unfinished=True).keys == ()
    assert len(inspect_run(bucket).rounds) == 6
    assert gang(2, lambda allreduce: ends(allreduce, 9 * H), uri) == whole


def test_what_was_begun_and_not_agreed_on_can_be_removed() -> None:
    uri = fresh_uri()
    gang(2, lambda allreduce: train(allreduce, 3 * H), uri)
    store = open_store(uri)
    for key in ("part-00000", "manifest-000"):
        store.put(f"run/rounds/fragment-0/00000003/{key}", 1, iter([memoryview(b"x")]))
    assert not any("00000003" in key for key in garbage(Bucket(store)).keys if "/rounds/" in key)
    left = [
        key for key in garbage(Bucket(store), unfinished=True).keys if key.startswith("run/rounds/fragment-0/00000003")
    ]
    assert len(left) == 2


@pytest.mark.parametrize(
    ("key", "text", "problem"),
    [
        ("run/log/fragment-0/00000000.json", '{"half', "00000000.json: is no JSON object; remove it"),
        ("run/log/fragment-0/00000000.json", "[]", "00000000.json: is no JSON object; remove it"),
        ("run/members/00000-00000.json", "{}", "members/00000-00000.json: has no 'rank'"),
        ("run/run.json", '{"format": 2}', "run/run.json: has the format 2, and this version of basilica knows 1"),
        ("run/run.json", '{"format": 1}', "run/run.json: has no 'arguments'"),
    ],
)
def test_what_is_broken_in_a_bucket_is_named(key: str, text: str, problem: str) -> None:
    uri = fresh_uri()
    gang(1, lambda allreduce: train(allreduce, H), uri)
    write(open_store(uri), key, text.encode())
    with pytest.raises(RoundError, match=problem):
        inspect_run(Bucket(open_store(uri)))


def test_what_a_later_version_adds_to_the_record_and_strangers_to_the_states_does_no_harm() -> None:
    uri = fresh_uri()
    gang(1, lambda allreduce: train(allreduce, 2 * H), uri)
    store = open_store(uri)
    record = store.read(Range("run/run.json", 0, 1 << 16))
    assert record is not None
    write(store, "run/run.json", json.dumps({**json.loads(bytes(record)), "more": 1}).encode())
    for stranger in ("notes.txt", "latest/00000-of-00001"):
        write(store, f"run/states/fragment-0/{stranger}", b"x")
    found = inspect_run(Bucket(store))
    assert found.record is not None
    assert [state.round for state in found.agreed] == [2]
    assert Bucket(store).forget_states("fragment-0", 2) > 0
    gang(1, lambda allreduce: train(allreduce, 4 * H), uri)
    assert inspect_run(Bucket(store)).agreed[0].round == 4


def write(store: ObjectStore, key: str, data: bytes) -> None:
    store.put(key, len(data), iter([memoryview(data)]))
