"""What a probe reports, as JSON of less than 4 KiB: it fits into the termination message of a container.

The bandwidths are those of the largest size that was swept, which is what big gradients see: p50 is the median
of its repeats, p10 and p90 say how steady the link is. `latency_us_at_1mib` is what its name says, the median time of
one all-reduce of 1 MiB; None where the link is too slow for that size. The latency of the smallest size, which others
put under that name, is the first point of `sweep`.
"""

import json
from collections.abc import Sequence
from typing import Any

from basilica.bench.sweep import MIB, Measured
from basilica.core.seen import BenchPoint, BenchResult

FORMAT = 1


def report(method: str, swept: Sequence[Measured], *, node_a: str, node_b: str, measured_at: float) -> dict[str, Any]:
    largest = swept[-1]
    at_1mib = [each.latency_us for each in swept if each.size == MIB]
    return {
        "format": FORMAT,
        "method": method,
        "measured_at": measured_at,
        "node_a": node_a,
        "node_b": node_b,
        "busbw_gbps": [_rounded(largest.bus_gbps(share)) for share in (0.1, 0.5, 0.9)],
        "algbw_gbps": _rounded(largest.algorithm_gbps(0.5)),
        "latency_us_at_1mib": _rounded(at_1mib[0]) if at_1mib else None,
        "sweep": [
            {
                "size": each.size,
                "algbw_gbps": _rounded(each.algorithm_gbps(0.5)),
                "busbw_gbps": _rounded(each.bus_gbps(0.5)),
                "latency_us": _rounded(each.latency_us),
                "repeats": len(each.times),
            }
            for each in swept
        ],
    }


def failure(problem: str) -> dict[str, Any]:
    return {"format": FORMAT, "error": problem}


def problem_in(text: str) -> str:
    """The one-line reason of a failed probe, empty where the report holds none."""
    try:
        body = json.loads(text)
    except ValueError:
        return ""
    return str(body.get("error") or "") if isinstance(body, dict) else ""


def parse(text: str) -> BenchResult:
    """The result of a probe that succeeded; `ValueError` if this is none."""
    try:
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise ValueError("a report of another version of basilica")
        p10, p50, p90 = map(float, body["busbw_gbps"])
        latency = body["latency_us_at_1mib"]
        return BenchResult(
            measured_at=float(body["measured_at"]),
            probe_node_a=str(body["node_a"]),
            probe_node_b=str(body["node_b"]),
            busbw_gbps_p10=p10,
            busbw_gbps_p50=p50,
            busbw_gbps_p90=p90,
            algbw_gbps_p50=float(body["algbw_gbps"]),
            latency_us_at_1mib=None if latency is None else float(latency),
            size_bytes_swept=tuple(int(point["size"]) for point in body["sweep"]),
            method=str(body["method"]),
            sweep=tuple(
                BenchPoint(
                    size_bytes=int(point["size"]),
                    algbw_gbps=float(point["algbw_gbps"]),
                    busbw_gbps=float(point["busbw_gbps"]),
                    latency_us=float(point["latency_us"]),
                    repeats=int(point["repeats"]),
                )
                for point in body["sweep"]
            ),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the report of a probe: {error!r}") from None


def _rounded(number: float) -> float:
    """Four digits: a probe does not measure more, and the report stays short."""
    return float(f"{number:.4g}")
