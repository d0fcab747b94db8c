"""The Secret that outlives a run's rendezvous: results, last reports and series of its ranks.

The operator that ends the rendezvous writes it first. If that operator is killed in between, its successor writes the
Secret again.
"""

import asyncio
import base64
import json
import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from basilica.core.errors import DistributedError
from basilica.core.reports import Report
from basilica.kube.client.api import ApiError, KubeApi
from basilica.kube.manifests.run import RunObjects
from basilica.ports import Run
from basilica.reports.series import POINTS, PointsBySource, pack, unpack
from basilica.runtimes.kubernetes.refusals import refusals
from basilica.runtimes.kubernetes.reports import parse_reports

log = logging.getLogger(__name__)

KEPT_BYTES_MAX = 960 << 10  # an object of Kubernetes holds 1 MiB
RESULTS_BYTES_MAX = 700 << 10  # of all ranks together
RESULTS_DROPPED = "basilica.dev/results-too-large"  # how many bytes they had
SERIES_LEFT_OUT = "basilica.dev/series-left-out"  # how many had no room
KEPT_IN_MEMORY = 64


@dataclass(frozen=True, slots=True)
class Reported:
    """The last reports of ranks, as they wrote them, and their series."""

    reports: Mapping[int, str] = field(default_factory=dict)
    series: PointsBySource = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kept:
    """The content of the Secret."""

    annotations: Mapping[str, str]
    data: Mapping[str, bytes]

    def results(self, instance: str) -> dict[int, bytes]:
        dropped = self.annotations.get(RESULTS_DROPPED)
        if dropped is not None:
            problem = f"the results of {instance} have {dropped} bytes, and {RESULTS_BYTES_MAX} can be kept"
            raise DistributedError(f"{problem}: return less, and write the rest to a file or a bucket")
        found = {name.removeprefix("rank-"): value for name, value in self.data.items() if name.startswith("rank-")}
        return {int(rank): value for rank, value in found.items()}

    def reports(self) -> dict[int, Report]:
        data = self.data.get("reports")
        return {} if data is None else parse_reports(json.loads(zlib.decompress(data)))

    def series(self) -> PointsBySource:
        data = self.data.get("series")
        return {} if data is None else unpack(data, room=KEPT_BYTES_MAX)


NOTHING = Kept({}, {})


def to_keep(results: Mapping[int, bytes], reported: Reported) -> Kept:
    """Return as much as one object holds.

    Results that do not fit are not kept at all, and a reader gets an error that says so; series are thinned until they
    fit.
    """
    annotations: dict[str, str] = {}
    size = sum(map(len, results.values()))
    if size > RESULTS_BYTES_MAX:
        annotations[RESULTS_DROPPED] = str(size)
        results, size = {}, 0
    data = {f"rank-{rank}": value for rank, value in results.items()}
    if reported.reports:
        data["reports"] = _fitting(reported.reports, KEPT_BYTES_MAX - size)
        size += len(data["reports"])
    if reported.series:
        packed = pack(reported.series, points=POINTS, room=KEPT_BYTES_MAX - size)
        data["series"] = packed.data
        if packed.left_out:
            annotations[SERIES_LEFT_OUT] = str(packed.left_out)
    return Kept(annotations, data)


def _fitting(reports: Mapping[int, str], room: int) -> bytes:
    """Pack the reports of all ranks, or, where they do not fit, of as many as do, the lowest first."""
    ranks = sorted(reports)
    while True:
        data = zlib.compress(json.dumps({str(rank): reports[rank] for rank in ranks}).encode(), 9)
        if len(data) <= room:
            return data
        log.warning("the last reports of %d ranks do not fit; half of them are kept", len(ranks))
        ranks = ranks[: len(ranks) // 2]


class KeptResults:
    """Writes and reads the Secrets. `objects` renders the objects of a run on the cluster."""

    def __init__(self, api: KubeApi, objects: Callable[[Run], RunObjects]) -> None:
        self._api, self._objects = api, objects
        self._known: dict[str, Kept] = {}

    async def keep(self, run: Run, results: Mapping[int, bytes], reported: Reported) -> None:
        """Write the Secret, unless there is nothing to keep."""
        if not results and not reported.reports and not reported.series:
            return
        kept, objects = await asyncio.to_thread(to_keep, results, reported), self._objects(run)
        if SERIES_LEFT_OUT in kept.annotations:
            log.warning("%s: %s series have no room and are not kept", run.instance, kept.annotations[SERIES_LEFT_OUT])
        with refusals(f"cannot keep what the ranks of {run.instance} gave"):
            await self._api.apply(objects.paths()["kept"], objects.keep(kept.data, kept.annotations), force=True)

    async def read(self, run: Run, *, for_good: bool) -> Kept:
        """Return the content of the run's Secret. `for_good`: the rendezvous is gone, so that it can be cached."""
        known = self._known.get(run.instance)
        if known is not None:
            return known
        with refusals(f"cannot read what was kept of {run.instance}"):
            try:
                secret = await self._api.get(self._objects(run).paths()["kept"])
            except ApiError as error:
                if error.status != 404:
                    raise
                return NOTHING
        data: Mapping[str, str] = secret.get("data") or {}
        decoded = {name: base64.b64decode(value) for name, value in data.items()}
        kept = Kept(secret["metadata"].get("annotations") or {}, decoded)
        if for_good:
            self._known[run.instance] = kept
            while len(self._known) > KEPT_IN_MEMORY:
                del self._known[next(iter(self._known))]
        return kept

    def forget(self, instance: str) -> None:
        self._known.pop(instance, None)
