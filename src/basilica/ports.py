"""The ports: what the control plane needs of the outside, as Protocols. Adapters live in stores/ and runtimes/."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from basilica.core.actions import Launch, Probe, Stop
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
    """What one user may have at a time. None: no limit."""

    deployments: int | None = None
    ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as the store keeps it: never the key itself."""

    id: str
    user: str
    digest: str
    created_at: float
    note: str = ""


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """What one run used; it stays when the run is deleted."""

    user: str
    instance: str
    name: str
    rank_seconds: float
    gpu_seconds: float
    created_at: float
    ended_at: float | None


class Clock(Protocol):
    """Time as decisions need it: what is recorded of a run is on one time line, which the wall clock does not move."""

    def now(self) -> float:
        """Seconds on a time line that never jumps: near the seconds since the epoch, and close to them at its start."""
        ...

    def shift(self) -> float:
        """Seconds from that line to the wall clock as it is set now: moments are shown moved by them."""
        ...


class Store(Protocol):
    """Specs, statuses and events. Every write is whole or not at all; a failed one raises `StoreUnavailable`.

    A returned write is durable. After it the watchers are woken.
    """

    async def create(
        self,
        deployment: Deployment,
        events: Sequence[Event] = (),
        *,
        idempotency_key: str | None = None,
        limits: Limits = NO_LIMITS,
    ) -> Deployment:
        """Keep a new run. A live run of that name in the namespace: `NameInUse`; over a limit: `QuotaExceeded`.

        With the idempotency key of an earlier create of the same user, that one's run is returned instead; if its
        spec was another, `Conflict`.
        """
        ...

    async def get(self, instance: str) -> Deployment:
        """The run with that instance name, or `DeploymentNotFound`.

        One whose record cannot be read is `DeploymentDamaged`, here and wherever one run is asked for.
        """
        ...

    async def find(self, namespace: str, name: str) -> Deployment:
        """By instance name, else the newest run with that friendly name; another namespace's is not found."""
        ...

    async def deployments(self, namespace: str | None = None) -> list[Deployment]:
        """All runs of a namespace (of all, with None) that can be read, newest first."""
        ...

    async def listed(self, namespace: str | None = None) -> list[Deployment | DamagedRun]:
        """As `deployments`, with those whose record cannot be read in their place among the others."""
        ...

    async def live(self) -> list[str]:
        """The instances that the controller still has to do with: not settled, or to be deleted."""
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
        """Compare-and-swap on `before.version`: `StaleVersion` and nothing written if somebody wrote in between."""
        ...

    async def condemn(self, instance: str) -> Deployment:
        """Have a run end and go whose record cannot be read: as a delete, with what is damaged replaced by a stand-in.

        The controller stops what it sees of the run, and removes it.
        """
        ...

    async def delete(self, instance: str) -> None:
        """Remove the run with its events; its usage stays on its user's account. Removing what is gone is fine."""
        ...

    async def events(self, instance: str, *, limit: int | None = None, since: int = 0) -> list[RecordedEvent]:
        """Newest first; `since` is a version: only what was recorded (or repeated) after it."""
        ...

    async def usage(self, user: str, *, limit: int | None = None, offset: int = 0) -> list[UsageRow]:
        """By run, newest first, deleted ones too."""
        ...

    async def wait_change(self, instance: str, version: int, timeout: float | None) -> Deployment | None:
        """The run as soon as its version is newer than `version` (perhaps at once); None if the time is up first.

        `DeploymentNotFound` if it is gone, or goes while waiting.
        """
        ...

    async def prune(self, before: float) -> list[str]:
        """Instances that ended before that moment and have nothing left to do: what retention may remove."""
        ...

    def changes(self, since: int | None = None) -> AsyncGenerator[str, None]:
        """Instance names as they change, for ever; coalesced, so a slow reader sees each changed run once.

        With `since`, also those that changed after that version already. Deletion is a change too.
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
    """What a runtime needs to know of a run in order to act on it. `lost`: ranks that will not be started again."""

    instance: str
    user: str
    namespace: str
    created_at: float
    spec: DeploymentSpec
    owner: Owner | None = None
    lost: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Whole lines of one rank; a line still being written comes later, whole. `cursor`: where to go on."""

    rank: int
    lines: tuple[str, ...]
    cursor: str


@dataclass(frozen=True, slots=True)
class StoredArchive:
    """A directory that a user sent, by the SHA-256 of its bytes."""

    digest: str
    bytes: int


InUse = Callable[[], Awaitable[Collection[tuple[str, str]]]]
"""Finds out which archives runs still refer to, as (user, digest)."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a command wrote."""

    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The last of a command."""

    exit_code: int


class Runtime(Protocol):
    """Where ranks run. Actions are idempotent: what is there already, or gone already, is success.

    `observe` tells facts and raises `RuntimeUnavailable` when it cannot tell; it never guesses.
    """

    name: str
    runs_images: bool

    async def start(self, wake: Callable[[str], None]) -> None:
        """Begin; adopt what an earlier control plane left running. `wake(instance)` is called when a run changed."""
        ...

    async def close(self) -> None:
        """Let go. Ranks go on."""
        ...

    async def observe(self, run: Run) -> Sighting: ...

    async def launch(self, run: Run, launches: Sequence[Launch]) -> None: ...

    async def stop(self, run: Run, stops: Sequence[Stop]) -> None: ...

    async def announce(self, run: Run, announcement: Announcement) -> None:
        """Open the run's rendezvous if it is not, and have it say exactly this."""
        ...

    async def end_rendezvous(self, run: Run) -> None: ...

    async def probe(self, run: Run, probe: Probe) -> None:
        """Start the bench probe; what it does is seen by `observe`. A runtime that cannot says so there."""
        ...

    async def end_probe(self, run: Run) -> None: ...

    async def remove(self, run: Run) -> None:
        """Remove all that is kept of a run of which nothing runs any more."""
        ...

    async def tail(self, run: Run, rank: int, lines: int | None) -> LogChunk:
        """The last lines of a rank, over all its attempts; `lines` None: all that is kept."""
        ...

    async def tail_cursor(self, run: Run, rank: int, lines: int) -> str:
        """The cursor before the last lines of a rank, over all its attempts: before all of them if it has no more."""
        ...

    def read(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        """The rank's lines from the cursor (None: from the beginning) up to now, some at a time."""
        ...

    def follow(self, run: Run, rank: int, cursor: str | None) -> AsyncGenerator[LogChunk, None]:
        """The rank's lines from the cursor (None: from the beginning) as they come, until cancelled by the reader.

        A chunk without lines says that all that was there has been read: nothing comes from an ended rank after it.
        """
        ...

    async def reports(self, run: Run) -> dict[int, Report]:
        """The last that each rank reported; one that never did is absent."""
        ...

    async def series(self, run: Run, query: SeriesQuery) -> list[Series]:
        """What ranks reported over time, by rank, worker and name."""
        ...

    async def next_report(self, run: Run, after: float) -> None:
        """Return when some rank has reported later than that moment, perhaps at once."""
        ...

    async def results(self, run: Run) -> Mapping[int, bytes | BadResult]:
        """What ranks wrote to their result files, by rank; in the place of one that cannot be given, why not."""
        ...

    def execute(self, run: Run, rank: int, argv: Sequence[str]) -> AsyncGenerator[Output | Exited, None]:
        """Run a command beside the rank: its machine, directory and environment. Closing the generator ends it, whole.

        The first output is empty and says that it runs. A rank that was never launched, or that has ended with all that
        a command would need: `Conflict`. A command that is lost sight of is `RuntimeUnavailable`, never an exit code.
        """
        ...

    async def store_archive(self, user: str, chunks: AsyncIterator[bytes]) -> StoredArchive:
        """Keep a tar.gz for runs of this user. What cannot be unpacked safely is refused: `ValidationError`."""
        ...

    async def has_archive(self, user: str, digest: str) -> bool:
        """True if it is there; its age then counts from now."""
        ...

    async def forget_archives(self, in_use: InUse, before: float) -> list[str]:
        """Remove archives that nobody has wanted since that moment, apart from those that are in use.

        `in_use` is asked only if there are any.
        """
        ...
