"""What the times amount to, and when the sweep stops."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basilica.bench import report, sweep
from basilica.bench.sweep import KIB, MIB, Measured


def test_a_size_that_takes_a_millisecond() -> None:
    measured = Measured(MIB, (0.001,) * 5)
    assert measured.latency_us == pytest.approx(1000)
    assert measured.algorithm_gbps(0.5) == pytest.approx(1.048576)
    assert measured.bus_gbps(0.5) == pytest.approx(1.048576)  # of two ranks each sends as many bytes as it has


def test_the_slowest_tenth_is_p10() -> None:
    measured = Measured(1_000_000, tuple(0.001 * n for n in range(1, 11)))
    assert measured.bus_gbps(0.1) < measured.bus_gbps(0.5) < measured.bus_gbps(0.9)
    assert measured.bus_gbps(0.0) == pytest.approx(0.1)
    assert measured.bus_gbps(1.0) == pytest.approx(1.0)


@given(st.lists(st.floats(1e-7, 10), min_size=1), st.floats(0, 1))
def test_a_percentile_is_within_what_was_measured(values: list[float], share: float) -> None:
    found = sweep.percentile(values, share)
    assert min(values) * 0.999999 <= found <= max(values) * 1.000001


@given(st.floats(1e-7, 100), st.floats(-5, 100))
def test_the_number_of_repeats_is_bounded(once: float, left: float) -> None:
    assert sweep.REPEATS_MIN <= sweep.repeats(once, left) <= sweep.REPEATS_MAX


@given(st.floats(1e3, 1e12), st.floats(1e-6, 0.5), st.floats(0.5, 30))
def test_a_link_of_any_speed_is_swept_within_its_budget(bytes_per_s: float, latency: float, budget: float) -> None:
    """As the probe does it, on a link that takes `latency` and the time for the bytes."""
    spent = 0.0
    swept: list[Measured] = []
    for size in sweep.SIZES:
        if not sweep.fits(size, swept[-1] if swept else None, budget - spent):
            break
        once = latency + size / bytes_per_s
        repeats = sweep.repeats(once, budget - spent - (1 + sweep.WARM_UPS) * once)
        spent += (1 + sweep.WARM_UPS + 1 + repeats) * once
        swept.append(Measured(size, (once,) * repeats))
    first = latency + sweep.SIZES[0] / bytes_per_s
    assert swept
    # The first size is always measured. A batch begins with one all-reduce more than was planned for.
    assert spent <= max(budget + 2 * swept[-1].times[0], (2 + sweep.WARM_UPS + sweep.REPEATS_MAX) * first)


def test_a_report_is_read_back_as_it_was_and_fits_a_termination_message() -> None:
    swept = [Measured(size, (1.23456789e-3, 2.3456789e-3, 9.87654321)) for size in sweep.SIZES]
    text = json.dumps(report.report("gloo", swept, node_a="n" * 253, node_b="m" * 253, measured_at=1e9))
    assert len(text) < 4096
    found = report.parse(text)
    assert (found.method, found.probe_node_a, found.probe_node_b) == ("gloo", "n" * 253, "m" * 253)
    assert found.size_bytes_swept == sweep.SIZES
    assert found.latency_us_at_1mib == pytest.approx(2345.68, rel=1e-3)
    assert found.busbw_gbps_p50 == found.sweep[-1].busbw_gbps == found.algbw_gbps_p50
    assert [point.repeats for point in found.sweep] == [3] * len(sweep.SIZES)


def test_a_sweep_that_stopped_before_1_mib_has_no_time_for_it() -> None:
    text = json.dumps(report.report("tcp", [Measured(KIB, (0.5,))], node_a="a", node_b="b", measured_at=1.0))
    assert report.parse(text).latency_us_at_1mib is None


@pytest.mark.parametrize(
    "text", ["", "[]", "7", "{}", '{"format":1}', '{"format":2,"sweep":[]}', '{"format":1,"error":"x"}']
)
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  json's own, or ours
        report.parse(text)
