"""A status that an earlier version wrote is read; what it did not know takes its default."""

import json
from dataclasses import replace

from basilica.core.phase import BenchPhase
from basilica.core.seen import BenchPoint, BenchResult
from basilica.core.status import BenchStatus, DeploymentStatus
from basilica.stores.encoding import decode_status, encode_status
from basilica.stores.kubernetes.ledger import parse_row

POINT = BenchPoint(size_bytes=1024, algbw_gbps=1.0, busbw_gbps=1.0, latency_us=9.0, repeats=5)
RESULT = BenchResult(measured_at=1.0, probe_node_a="a", probe_node_b="b", busbw_gbps_p50=1.0, size_bytes_swept=(1024,))


def status_with(result: BenchResult) -> DeploymentStatus:
    return DeploymentStatus(created_at=1.0, bench=BenchStatus(phase=BenchPhase.SUCCEEDED, result=result))


def test_a_result_is_kept_with_its_method_and_its_sweep() -> None:
    status = status_with(replace(RESULT, method="tcp", sweep=(POINT,)))
    assert decode_status(encode_status(status)) == status


def test_a_result_from_before_there_was_a_method_or_a_sweep() -> None:
    row = json.loads(encode_status(status_with(RESULT)))
    assert "method" not in row["bench"]["result"]
    assert "sweep" not in row["bench"]["result"]
    assert decode_status(json.dumps(row)) == status_with(RESULT)


def test_a_row_of_usage_from_before_there_were_accounts_of_time() -> None:
    row = parse_row("ann", "old-1", '["old", 8.0, 4.0, 1.0, 9.0]')
    assert (row.rank_seconds, row.ended_at, row.training_seconds, row.lost_seconds) == (8.0, 9.0, 0.0, 0.0)
