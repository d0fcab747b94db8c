"""A common policy of S3: a role may get, put and list, and not delete. moto's server enforces it."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from basilica.diloco import ObjectStoreAllReduce
from basilica.diloco.bucket import Bucket
from basilica.diloco.inspection import collect_garbage, garbage, inspect_run
from basilica.diloco.stores import open_store
from tests.diloco.gang import gang
from tests.diloco.test_run import H, ends
from tests.diloco.test_stores import s3_options

ROUNDS = 5
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.readline()
server.stop()
"""
POLICY = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": ["s3:Get*", "s3:PutObject", "s3:List*"], "Resource": "*"}],
}


@pytest.fixture(scope="module")
def role() -> Iterator[dict[str, Any]]:
    """The options of a store that is opened by somebody who may not delete."""
    pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = server.stdout.readline().decode().strip()
        assert url, "the server did not start"
        root = {"aws_access_key_id": "root", "aws_secret_access_key": "root", "region_name": "us-east-1"}
        with closing(boto3.client("s3", endpoint_url=url, **root)) as buckets:
            buckets.create_bucket(Bucket="bucket")
        with closing(boto3.client("iam", endpoint_url=url, **root)) as users:
            users.create_user(UserName="trainer")
            users.put_user_policy(UserName="trainer", PolicyName="no-delete", PolicyDocument=json.dumps(POLICY))
            key = users.create_access_key(UserName="trainer")["AccessKey"]
        plain = {"Content-Type": "text/plain"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset-auth", b"0", plain)):
            pass  # from now on it counts
        yield {
            **s3_options(url),
            "access_key_id": key["AccessKeyId"],
            "secret_access_key": key["SecretAccessKey"],
        }
        server.stdin.close()


def test_the_role_may_not_delete(role: dict[str, Any]) -> None:
    """Otherwise the other tests test nothing. It is an error at once, however patient the store is."""
    store = open_store("s3://bucket/alone", role, patience=3600)
    assert store.put_if_absent("a", 1, iter([memoryview(b"1")]))
    with pytest.raises(ConnectionError, match=r"AccessDenied|403"):
        store.delete(["a"])
    assert [found.key for found in store.list("")] == ["a"]


def test_the_means_are_right_and_the_trouble_is_told(role: dict[str, Any]) -> None:
    def replica(allreduce: ObjectStoreAllReduce) -> tuple[list[float], list[str]]:
        means = [
            float(allreduce.allreduce([np.full(8, 10 * round + allreduce.rank, np.float32)])[0][0])
            for round in range(ROUNDS)
        ]
        return means, [str(trouble) for trouble in allreduce.troubles.current]

    found = gang(2, replica, "s3://bucket/means", store_options=role, retain=0)
    assert [means for means, _ in found] == [[10 * round + 0.5 for round in range(ROUNDS)]] * 2
    assert "removing old rounds of 'default' in run 'run' fails" in found[0][1][0]
    assert "AccessDenied" in found[0][1][0]


def test_a_training_ends_as_with_all_rights_and_the_inspection_shows_the_trouble(role: dict[str, Any]) -> None:
    uri = "s3://bucket/training"
    assert gang(2, lambda allreduce: ends(allreduce, 6 * H), uri, store_options=role) == gang(
        2, lambda allreduce: ends(allreduce, 6 * H)
    )
    bucket = Bucket(open_store(uri, role))
    assert inspect_run(bucket).agreed[0].round == 6
    troubles = inspect_run(bucket).troubles
    assert any("removing old rounds" in text and "AccessDenied" in text for text in troubles)
    assert any("removing old states" in text for text in troubles)
    with pytest.raises(ConnectionError, match=r"AccessDenied|403"):
        collect_garbage(bucket, garbage(bucket))
