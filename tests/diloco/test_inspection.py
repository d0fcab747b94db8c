"""What a prefix tells of its run, and what of it can go."""

from basilica.diloco.bucket import Bucket
from basilica.diloco.inspection import collect_garbage, find_runs, garbage, inspect_run
from basilica.diloco.stores import open_store
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
