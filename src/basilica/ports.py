"""The ports: the control plane's interfaces to the outside, as Protocols. Adapters live in stores/ and runtimes/."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from basilica.core.actions import Launch, Probe, Stop
from basilica.core.checkpoints import Checkpoint
from basilica.core.damage import DamagedRun
from basilica.core.deployment import Deployment as Deployment  # noqa: PLC0414
from basilica.core.deployment import Owner as Owner  # noqa: PLC0414
from basilica.core.errors import BadResult
from basilica.core.events import Event, RecordedEvent
from basilica.core.mesh import Announcement
from basilica.core.reports import Report, Series, SeriesQuery
from basilica.core.seen import Sighting
from basilica.core.spec import DeploymentSpec
from basilica.core.status import DeploymentStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The quota of one user at a time. None: no limit."""

    deployments: int | None = None
    ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """The stored record of a key: its digest, never the key itself."""

    id: str
    user: str
    digest: str
    created_at: float
    note: str = ""


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """The usage of one run; it is kept when the run is deleted. Training and losses are in seconds of ranks."""

    user: str
    instance: str
    name: str
    rank_seconds: float
    gpu_seconds: float
    created_at: float
    ended_at: float | None
    training_seconds: float = 0.0
    lost_seconds: float = 0.0


class Clock(Protocol):
    """The clock of decisions: all records of a run are on one time line, which no change of the wall clock moves."""

    def now(self) -> float:
        """Return seconds on a time line that never jumps: near the seconds since the epoch, and equal to them at its
        start."""
        ...

    def shift(self) -> float:
        """Return the seconds from that line to the wall clock as it is set now: times are shown shifted by them."""
        ...


class Store(Protocol):
    """Specs, statuses and events. Every write is atomic; a failed one raises `StoreUnavailable`.

    A write that returns is durable. After it the watchers are woken.
    """

    async def create(
        self,
        deployment: Deployment,
        events: Sequence[Event] = (),
        *,
        idempotency_key: str | None = None,
        limits: Limits = NO_LIMITS,
    ) -> Deployment:
        """Persist a new run. A live run of that name in the namespace: `NameInUse`; over a limit: `QuotaExceeded`.

        With the idempotency key of an earlier create of the same user, return the run of that create instead; if its
        spec differed, raise `Conflict`.
        """
        ...

    async def get(self, instance: str) -> Deployment:
        """Return the run with that instance name, or raise `DeploymentNotFound`.

        A run whose record cannot be read raises `DeploymentDamaged`, here and in every method for one run.
        """
        ...

    async def find(self, namespace: str, name: str) -> Deployment:
        """Return the run by its instance name, else the newest with that friendly name; never of another namespace."""
        ...

    async def deployments(self, namespace: str | None = None) -> list[Deployment]:
        """Return all readable runs of a namespace (None: of all), newest first."""
        ...

    async def listed(self, namespace: str | None = None) -> list[Deployment | DamagedRun]:
        """Return the same as `deployments`, with unreadable runs in their place among the others."""
        ...

    async def live(self) -> list[str]:
        """Return the instances that need the controller: not settled, or to be deleted."""
        ...

    async def change_spec(
        self,
        instance: str,
        change: Callable[[Deployment], DeploymentSpec],
        events: Sequence[Event] = (),
        *,
        limits: Limits = NO_LIMITS,
    ) -> Deployment:
        """Apply `change` to the newest state, atomically; it may raise to refuse. An unchanged spec writes nothing.

        More ranks than the limits allow: `QuotaExceeded`.
        """
        ...

    async def save_status(
        self, before: Deployment, status: DeploymentStatus, events: Sequence[Event] = (), *, now: float
    ) -> Deployment:
        """Compare-and-swap on `before.version`: after a write in between, raise `StaleVersion` and write nothing."""
        ...

    async def condemn(self, instance: str) -> Deployment:
        """Delete a run whose record cannot be read: a stand-in replaces the damaged parts.

        The controller stops all ranks of the run that it observes, and removes it.
        """
        ...

    async def delete(self, instance: str) -> None:
        """Remove the run with its events; its usage stays on its user's account. An absent run is no error."""
        ...

    async def events(self, instance: str, *, limit: int | None = None, since: int = 0) -> list[RecordedEvent]:
        """Return the events, newest first; `since` is a version: only those recorded (or repeated) after it."""
        ...

    async def usage(self, user: str, *, limit: int | None = None, offset: int = 0) -> list[UsageRow]:
        """Return the usage by run, newest first, of deleted runs too."""
        ...

    async def wait_change(self, instance: str, version: int, timeout: float | None) -> Deployment | None:
        """Return the run as soon as its version is newer than `version` (perhaps at once); None after the timeout.

        `DeploymentNotFound` if the run is deleted, before or during the wait.
        """
        ...

    async def prune(self, before: float) -> list[str]:
        """Return the settled instances that ended before that time: retention may remove them."""
        ...

    def changes(self, since: int | None = None) -> AsyncGenerator[str, None]:
        """Yield the names of instances as they change, for ever; coalesced: a slow reader gets each changed run once.

        With `since`, also those that changed after that version already. A deletion is a change too.
        """
        ...


class Keys(Protocol):
    """API keys, by digest."""

    async def add_key(self, key: ApiKey) -> None: ...
    async def find_key(self, digest: str) -> ApiKey | None: ...
    async def keys(self) -> list[ApiKey]: ...
    async def revoke_key(self, id: str) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The facts of a run that a runtime needs for its actions. `lost`: ranks that will not be started again.

    `fresh_steps`: ranks whose steps a look has to read anew.
    """

    instance: str
    user: str
    namespace: str
    created_at: float
    spec: DeploymentSpec
    owner: Owner | None = None
    lost: frozenset[int] = frozenset()
    fresh_steps: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Complete lines of one rank; a partial line is delivered once complete. `cursor`: the place to continue from."""

    rank: int
    lines: tuple[str, ...]
    cursor: str


@dataclass(frozen=True, slots=True)
class StoredArchive:
    """A directory that a user uploaded, by the SHA-256 of its bytes."""

    digest: str
    bytes: int


InUse = Callable[[], Awaitable[Collection[tuple[str, str]]]]
"""Returns the archives that runs still refer to, as (user, digest)."""


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a command."""

    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The exit of a command, its last item."""

    exit_code: int


class Runtime(Protocol):
    """The place where ranks run. Actions are idempotent: a rank that runs already, or has ended already, is success.

    `observe` returns facts, and raises `RuntimeUnavailable` when it has none; it never guesses.
    """

    name: str
    runs_images: bool

    async def start(self, wake: Callable[[str], None]) -> None:
        """Start, and adopt the ranks of an earlier control plane. Call `wake(instance)` after each change of a run."""
        ...

    async def close(self) -> None:
        """Release all resources. Ranks go on."""
        ...

    async def observe(self, run: Run) -> Sighting: ...

    async def launch(self, run: Run, launches: Sequence[Launch]) -> None: ...

    async def stop(self, run: Run, stops: Sequence[Stop]) -> None: ...

    async def announce(self, run: Run, announcement: Announcement) -> None:
        """Open the run's rendezvous if it is not open, and publish exactly this announcement."""
        ...

    async def end_rendezvous(self, run: Run) -> None: ...

    async def probe(self, run: Run, probe: Probe) -> None:
        """Start the bench probe; `observe` returns its state, also that this runtime has none."""
        ...

    async def end_probe(self, run: Run) -> None: ...

    async def persist_snapshots(self, run: Run) -> None:
        """Begin to move the snapshots of an ended run from memory to its checkpoint directory, and do not wait for it.

        `observe` says whether there are any. A move that a crash interrupts is asked for again after the next start.
        """
        ...

    async def checkpoints(self, run: Run) -> tuple[Checkpoint, ...] | None:
        """Return the snapshots of the run by step and tier, newest first; None if this runtime cannot read them."""
        ...

    async def remove(self, run: Run) -> None:
        """Remove all files and objects of a run that has no running process."""
        ...

    async def tail(self, run: Run, rank: int, lines: int | None) -> LogChunk:
        """Return the last lines of a rank, over all its attempts; `lines` None: all that are kept."""
        ...

    async def tail_cursor(self, run: Run, rank: int, lines: int) -> str:
        """Return the cursor before the last lines of a rank, over all attempts: before all lines if it has no more."""
        ...

    def read(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        """Yield the rank's lines from the cursor (None: from the beginning) up to now, in chunks."""
        ...

    def follow(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        """Yield the rank's lines from the cursor (None: from the beginning) as they come, until the reader cancels.

        A chunk without lines means that all lines so far have been read: an ended rank yields nothing after it.
        """
        ...

    async def reports(self, run: Run) -> dict[int, Report]:
        """Return the last report of each rank; a rank that never reported is absent."""
        ...

    async def series(self, run: Run, query: SeriesQuery) -> list[Series]:
        """Return the reports of ranks over time, by rank, worker and name."""
        ...

    async def next_report(self, run: Run, after: float) -> None:
        """Wait until some rank has reported later than that time, perhaps at once."""
        ...

    async def results(self, run: Run) -> Mapping[int, bytes | BadResult]:
        """Return the ranks' result files by rank; in the place of an unusable one, the reason."""
        ...

    def execute(self, run: Run, rank: int, argv: Sequence[str]) -> AsyncGenerator[Output | Exited, None]:
        """Run a command beside the rank: its machine, directory and environment. Closing the generator ends the command
        with all its processes.

        The first output is empty: the command runs. A rank that was never launched, or that has ended with all that a
        command would need: `Conflict`. A command that is lost raises `RuntimeUnavailable`, never yields an exit code.
        """
        ...

    async def store_archive(self, user: str, chunks: AsyncIterator[bytes]) -> StoredArchive:
        """Store a tar.gz for runs of this user. An archive that cannot be unpacked safely raises `ValidationError`."""
        ...

    async def has_archive(self, user: str, digest: str) -> bool:
        """Return True if the archive is stored; its age then counts from now."""
        ...

    async def forget_archives(self, in_use: InUse, before: float) -> list[str]:
        """Remove the archives that no request has used since that time, apart from those in use by runs.

        `in_use` is called only if there are any.
        """
        ...
