"""The bucket is the run, on an object store as S3 is one: moto's server over HTTP."""

from basilica.diloco.bucket import Bucket
from basilica.diloco.inspection import collect_garbage, find_runs, garbage, inspect_run
from basilica.diloco.stores import open_store
from tests.diloco.gang import gang
from tests.diloco.test_run import H, ends, train
from tests.diloco.test_stores import s3, s3_options

__all__ = ["s3"]  # a fixture is used by its name


def test_a_run_on_s3_is_inspected_cleaned_and_goes_on_with_another_world(s3: str) -> None:
    uri, options = "s3://bucket/run-on-s3", s3_options(s3)
    gang(2, lambda allreduce: train(allreduce, 4 * H), uri, store_options=options)
    store = open_store(uri, options)
    assert find_runs(store) == ["run"]
    found = inspect_run(Bucket(store))
    assert [len(entry["weights"]) for entry in found.rounds] == [2] * 4
    assert found.agreed[0].round == 4
    collect_garbage(Bucket(store), garbage(Bucket(store), unfinished=True))
    first, second, third = gang(3, lambda allreduce: ends(allreduce, 6 * H), uri, store_options=options)
    assert first == second == third
    assert [len(entry["weights"]) for entry in inspect_run(Bucket(store)).rounds] == [2] * 4 + [3] * 2
