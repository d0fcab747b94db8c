"""What `basilica train bench` shows and draws, and how it copes with any result."""

import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from basilica.cli import plot, show_bench
from basilica.client.views import BenchResult, BenchStatus
from basilica.core.errors import BasilicaError
from basilica.core.seen import BenchPoint

HOSTILE = '<script>alert(1)</script>\x1b[31m & "$x$"\n'


def measured(*points: tuple[int, float, float], **more: object) -> BenchResult:
    """A result with these sizes, GB/s and microseconds."""
    sweep = tuple(
        BenchPoint(size_bytes=size, algbw_gbps=bus, busbw_gbps=bus, latency_us=us, repeats=7)
        for size, bus, us in points
    )
    found = BenchResult(
        measured_at=datetime(2026, 1, 2, tzinfo=UTC),
        probe_node_a="north",
        probe_node_b="south",
        busbw_gbps_p10=0.9 * points[-1][1],
        busbw_gbps_p50=points[-1][1],
        busbw_gbps_p90=1.1 * points[-1][1],
        algbw_gbps_p50=points[-1][1],
        latency_us_at_1mib=points[-1][2],
        size_bytes_swept=tuple(size for size, _, _ in points),
        method="gloo",
        sweep=sweep,
    )
    return replace(found, **more)  # type: ignore[arg-type]


def drawn(status: BenchStatus) -> str:
    console = Console(width=100, force_terminal=False)
    with console.capture() as said:
        console.print(show_bench.bench(status))
    return said.get()


def test_the_verdict_is_a_sentence() -> None:
    found = measured((1024, 0.001, 900.0), (64 << 20, 1.25, 53687.0))
    assert show_bench.verdict(found) == (
        "An all-reduce of 64 MiB between two ranks moves 1.25 GB/s: 1 GB of gradients takes 800 ms, "
        "and the shortest message 900 us."
    )
    assert show_bench.verdict(replace(found, busbw_gbps_p50=None)) == "The bandwidth could not be measured."


def test_the_sweep_is_a_table() -> None:
    lines = drawn(BenchStatus(phase="Succeeded", result=measured((1024, 0.001, 900.0), (1 << 20, 1.25, 838.9))))
    rows = [line.split() for line in lines.splitlines()]
    assert ["1", "KiB", "1", "MB/s", "900", "us", "7"] in rows
    assert ["1", "MiB", "1.25", "GB/s", "839", "us", "7"] in rows
    assert ["between", "north", "and", "south"] in rows
    assert ["with", "gloo,", "on", "the", "CPU"] in rows


def test_plain_tcp_is_marked_as_such() -> None:
    lines = drawn(BenchStatus(phase="Succeeded", result=measured((1024, 0.1, 9.0), method="tcp")))
    assert "plain TCP, without torch: the traffic of an all-reduce, with nothing added up" in lines


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2.5e-7, "0.25 kB/s"), (0.0123, "12.3 MB/s"), (0.999, "999 MB/s"), (1, "1 GB/s"), (450.4, "450 GB/s")],
)
def test_bandwidths_as_people_write_them(value: float, text: str) -> None:
    assert show_bench.gbps(value) == text


@pytest.mark.parametrize(("us", "text"), [(0.5, "0.5 us"), (12.34, "12.3 us"), (1000, "1 ms"), (2.5e6, "2.5 s")])
def test_times_as_people_write_them(us: float, text: str) -> None:
    assert show_bench.time_text(us) == text


# ---- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found",
    [
        measured((1024, 0.001, 900.0)),
        measured((1024, 1e-9, 1e9), (4096, 1e-9, 4e9)),
        measured(*((1024 << n, 400.0 * (n + 1), 1.0) for n in range(17))),
        measured((1024, 0.0, 0.0), (4096, 0.0, 0.0)),
    ],
    ids=["one size", "slow", "fast", "nothing"],
)
def test_every_result_can_be_drawn_within_the_picture(found: BenchResult) -> None:
    root = ET.fromstring(plot.svg("llama", found))
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == 2 * len(found.sweep)
    for circle in circles:
        assert plot.LEFT <= float(circle.attrib["cx"]) <= plot.WIDTH - plot.RIGHT
        assert plot.TOP - 1 <= float(circle.attrib["cy"]) <= plot.HEIGHT


def test_strange_names_do_no_harm_in_a_picture(tmp_path: Path) -> None:
    found = measured((1024, 1.0, 2.0), probe_node_a=HOSTILE, probe_node_b=HOSTILE, method=HOSTILE)
    root = ET.fromstring(plot.svg(HOSTILE, found))
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
    plot.draw(HOSTILE, found, tmp_path / "link.png")
    assert (tmp_path / "link.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_only_svg_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = measured((1024, 1.0, 2.0))
    with pytest.raises(BasilicaError, match=r"use --plot .*link\.svg, or pip install 'basilica-train\[plot\]'"):
        plot.draw("llama", found, tmp_path / "link.png")
    plot.draw("llama", found, tmp_path / "link.svg")
    assert (tmp_path / "link.svg").read_text().startswith("<svg")
