"""The observer of a gang on Kubernetes until its end: it watches the pods, and reads the Job's status where needed."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event
from typing import Any

from basilica.executors.eks.calls import (
    SILENCE_SECONDS,
    Calls,
    WatchExpired,
    is_silence,
    is_transient,
    retry_after,
    status_of,
)
from basilica.executors.eks.evidence import GangEvidence
from basilica.executors.protocol import LOG_LINES
from basilica.kube.manifests.refused import AwaitedPods

log = logging.getLogger(__name__)

WATCH_SECONDS = 600.0
READ_JOB_SECONDS = 30.0  # while ranks wait for a node: only the Job's status may show a change
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
REST_SECONDS = 1.0  # time for the last changes of pods to arrive after the Job's end
HINDRANCES = 3  # reasons in one log line
CULPRITS_READ = 3  # failed ranks whose log is fetched, beside the lines in their pods' statuses


@dataclass(frozen=True, slots=True)
class Place:
    """The namespace and name of a gang's Job."""

    namespace: str
    job_name: str


class Following:
    """The observer of one gang until its ranks have ended: a watch of its pods, and the Job's status where needed.

    A change costs the same in a gang of four and of four thousand: one evaluation of one rank.
    """

    def __init__(
        self, calls: Calls, place: Place, gang: GangEvidence, notify: Callable[[int], None], stop: Event
    ) -> None:
        self._calls, self._place, self._gang, self._notify, self._stop = calls, place, gang, notify, stop
        self._unended: set[int] = set()  # ranks that have not ended
        self._start_seconds: float | None = None
        self._longest = WATCH_SECONDS
        self._version = ""  # resource version of the observed pods; empty: list them
        self._relists = False
        self._pause = FIRST_PAUSE_SECONDS  # between reads of the Job
        self._troubles = 0  # in a row
        self._awaited = AwaitedPods()
        self._logged_hindrances: set[str] = set()

    def follow(self, ranks: set[int], deadline: float, *, start_seconds: float | None, longest: float) -> None:
        """Return once all ranks have ended, the deadline is over, or `stop` is set; a watch lasts at most `longest`."""
        self._unended, self._start_seconds, self._longest = set(ranks), start_seconds, longest
        if self._gang.since is None:
            self._gang.since = time.monotonic()
        self._update_all()
        while self._unended and not self._stop.is_set():
            trouble = self._try(self._read_job)
            if trouble is None:
                self._update_all()  # only after a complete read: a verdict is final, and its evidence may be missing
            if not self._unended or time.monotonic() >= deadline:
                break
            if trouble is None:
                trouble = self._try(lambda: self._follow_pods(deadline))
            if trouble is not None:
                self._rest(min(trouble, deadline - time.monotonic()))
        self._fetch_lines()

    def _update_all(self) -> None:
        for rank in sorted(self._unended):
            self._update(rank)

    def _update(self, rank: int) -> None:
        """Notify the caller of the rank's status, and drop a rank that has ended."""
        if not (self._gang.only_counts and self._calls.can_watch):  # the watch will soon report each rank
            self._notify(rank)
        if self._gang.over(rank):
            self._unended.discard(rank)

    def _try(self, step: Callable[[], None]) -> float | None:
        """Run one step; return None, or the seconds to wait after an error for which a retry may succeed."""
        try:
            step()
        except WatchExpired:
            self._version, self._relists = "", True
        except Exception as error:
            if not is_transient(error):
                raise
            self._troubles += 1
            return retry_after(error) or min(FIRST_PAUSE_SECONDS * 2.0 ** (self._troubles - 1), LONGEST_PAUSE_SECONDS)
        self._troubles = 0
        return None

    def _read_job(self) -> None:
        """Record the Job's status, and the reasons of ranks that wait."""
        job = self._calls.read_job(self._place.namespace, self._place.job_name)
        self._gang.see_job(job)
        if self._gang.gone or (self._gang.end is not None and self._gang.end.final):
            self._read_last_changes()
            if not self._unended <= self._gang.ever_there:
                self._read_refusal()
            return
        self._read_refusals_when_due()
        self._log_hindrances()

    def _follow_pods(self, deadline: float) -> None:
        """Read changes until the Job's status is due: a rank failed or lost its pod, or no change came for long."""
        left = deadline - time.monotonic()
        if not self._calls.can_watch:
            self._rest(min(left, self._next_pause()))
            return
        if self._give_up_if_late():
            return
        if not self._version:
            self._list_pods(fresh=self._relists)
            self._update_all()
        if not self._unended:
            return
        for kind, obj in self._watched(left):
            self._version = obj["metadata"]["resourceVersion"]
            rank = None if kind == "BOOKMARK" else self._gang.see_pod(obj, deleted=kind == "DELETED")
            if rank in self._unended:
                self._update(rank)
            if not self._unended:
                return

    def _watched(self, left: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events of one watch: a short one while the Job's status is awaited or ranks wait for a node."""
        gang, begun = self._gang, time.monotonic()
        unsure = gang.unsure(self._unended)
        quiet = self._longest if self._unended <= gang.started else min(self._longest, READ_JOB_SECONDS)
        seconds = self._next_pause() if unsure else quiet
        start_left = self._start_left()
        seconds = max(0.05, min(seconds, left, *([] if start_left is None else [start_left])))
        silence = max(0.05, self._awaited.ask_at - begun) if self._lacks_pods() else SILENCE_SECONDS
        place = self._place
        try:
            for event in self._calls.watch_pods(place.namespace, place.job_name, self._version, seconds, silence):
                yield event
                if time.monotonic() - begun > seconds or (gang.news and not unsure):
                    return
        except Exception as error:
            if not is_silence(error):
                raise

    # ---- gangs that do not start ---------------------------------------------------------------------------------

    def _pods_there(self) -> int:
        """Return the number of pods of ranks that have not ended; the Job's own count where pods are not watched."""
        return len(self._unended & self._gang.pods.keys()) if self._calls.can_watch else self._gang.active

    def _lacks_pods(self) -> bool:
        """Return whether the Job should have created more pods than exist."""
        return not (self._gang.suspended or self._gang.failing) and self._pods_there() < len(self._unended)

    def _read_refusals_when_due(self) -> None:
        """Read why pods are missing, when no new one has appeared for a while."""
        if not self._lacks_pods():
            self._gang.refusal = ""
        elif self._awaited.is_time_to_ask(self._pods_there(), time.monotonic()):
            self._read_refusal()

    def _read_refusal(self) -> None:
        self._gang.refusal = self._calls.read_refusal(self._place.namespace, self._place.job_name)

    def _log_hindrances(self) -> None:
        """Log why ranks wait, when a reason is new: the statuses alone would be `pending` for ever."""
        found = Counter(self._gang.hindrance(rank) for rank in self._unended)
        del found[""]
        if found.keys() - self._logged_hindrances:
            summary = "; ".join(f"{count} ranks: {why}" for why, count in found.most_common(HINDRANCES))
            log.warning("%s waits for %s", self._place.job_name, summary)
        self._logged_hindrances = set(found)

    def _start_left(self) -> float | None:
        if self._start_seconds is None or self._gang.since is None:
            return None
        return self._gang.since + self._start_seconds - time.monotonic()

    def _give_up_if_late(self) -> bool:
        """Delete a gang of which some ranks did not run in time: it occupies nodes that others could use."""
        left, gang = self._start_left(), self._gang
        if left is None or left > 0:
            return False
        self._list_pods(fresh=True)
        missing = self._unended - gang.started
        if not missing:
            self._start_seconds = None
            return False
        if self._lacks_pods():
            self._read_refusal()
        reasons = sorted({gang.hindrance(rank) for rank in missing} - {""})
        summary = f"; {'; '.join(reasons)}" if reasons else ""
        try:
            self._calls.delete_job(self._place.namespace, self._place.job_name)
        except Exception as error:
            if status_of(error) not in (404, 409):
                raise
        gang.give_up(f"given up: {len(missing)} ranks were not running after {self._start_seconds:g} s{summary}")
        return True

    # ---- evidence ------------------------------------------------------------------------------------------------

    def _read_last_changes(self) -> None:
        """Record the ends of pods that the watch has not reported yet, before a Job that is over gets its verdict."""
        if not self._version:
            self._list_pods(fresh=True)
            return
        place, gang = self._place, self._gang
        unexplained = self._unended - gang.exits.keys() - gang.vanished
        try:
            for kind, obj in self._calls.watch_pods(place.namespace, place.job_name, self._version, REST_SECONDS):
                self._version = obj["metadata"]["resourceVersion"]
                rank = None if kind == "BOOKMARK" else gang.see_pod(obj, deleted=kind == "DELETED")
                if rank in gang.exits or rank in gang.vanished:
                    unexplained.discard(rank)
                if not unexplained:
                    return
        except WatchExpired:
            self._list_pods(fresh=True)
        except Exception as error:
            if not is_silence(error):
                raise

    def _list_pods(self, *, fresh: bool) -> None:
        place = self._place
        if self._calls.can_watch:
            found, self._version = self._calls.list_to_watch(place.namespace, place.job_name, cached=not fresh)
        else:
            found = self._calls.list_pods(place.namespace, place.job_name)
        self._gang.see_listing(found)

    def _fetch_lines(self) -> None:
        """Fetch the output of the ranks that failed first, while their pods exist."""
        gang = self._gang
        for rank in gang.failed_by_themselves()[:CULPRITS_READ]:
            if rank in gang.logs or rank not in gang.pods:
                continue
            try:
                gang.logs[rank] = self._calls.read_log(self._place.namespace, gang.pods[rank], LOG_LINES)
            except Exception as error:
                if status_of(error) not in (400, 404) and not is_transient(error):
                    raise

    def _next_pause(self) -> float:
        pause, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE_SECONDS)
        return pause

    def _rest(self, seconds: float) -> None:
        self._stop.wait(max(0.0, seconds))
