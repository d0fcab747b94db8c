"""Training that loses no step: `basilica.Progress`."""

import os
import secrets
import time
from collections import deque
from typing import Any, SupportsFloat

from basilica.progress import notes
from basilica.progress.gang import Gang, find_gang
from basilica.progress.interval import STEPS_MAX, steps_between
from basilica.progress.memory import MemorySlots, copies_in
from basilica.progress.notices import Notice, notice
from basilica.progress.persisted import Persisting, copies_on_disk
from basilica.progress.restoring import Places, Restored, find
from basilica.progress.snapshot_file import BEST, Header, now
from basilica.progress.state import RANDOM, layout_of, put_back, restore_random_state, take
from basilica.reports.writer import report, warn

__all__ = ["Progress"]

SNAPSHOT_DIR = "BASILICA_SNAPSHOT_DIR"
CHECKPOINT_DIR = "BASILICA_CHECKPOINT_DIR"
RESUME_FROM = "BASILICA_RESUME_FROM"
RESUME_STEP = "BASILICA_RESUME_STEP"
PERSIST_SECONDS = 600.0
STEPS_MEASURED = 32
FIRST_AUTOMATIC = 3  # the first steps are slower than the rest, and their time says little
LEAVING_KINDS = ("cancel", "deadline", "preemption", "drain")  # changes after which the host's memory may be gone


class Progress:
    """The state of a training, kept: every part of it is restored to the newest step that the whole gang has saved.

    >>> progress = basilica.Progress(model=model, optimizer=optimizer, samples=samples)      # doctest: +SKIP
    >>> progress.restore()                                                                   # doctest: +SKIP
    >>> for indices in samples:                                                              # doctest: +SKIP
    ...     loss = train_step(indices)                                                       # doctest: +SKIP
    ...     progress.commit(loss=loss)                                                       # doctest: +SKIP

    Parts are objects with `state_dict` and `load_state_dict`, and plain values, which are read and set as
    `progress["name"]`. The random generators of Python, NumPy and torch are always included.

    `every`: the steps between two snapshots; None chooses the interval by their cost and by the failures seen.
    `directory`: where snapshots are kept outside a deployment. `persist_seconds`: the time between two persistent
    copies. `together`: False if the ranks of a run train models of their own.
    """

    def __init__(
        self,
        *,
        every: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        persist_seconds: float = PERSIST_SECONDS,
        together: bool = True,
        **parts: Any,
    ) -> None:
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(f"every= is a number of steps, 1 or more, not {every!r}")
        if not parts:
            raise ValueError("name what is to be kept: Progress(model=model, optimizer=optimizer)")
        for name, part in parts.items():
            if hasattr(part, "state_dict") != hasattr(part, "load_state_dict"):
                raise ValueError(f"{name} has only one of state_dict and load_state_dict")
        self.step = 0
        self.restored_from: int | None = None
        self._parts: dict[str, Any] = parts
        self._advancing = [part.advance for part in parts.values() if hasattr(part, "advance")]
        self._every = every
        self._together = together
        self._persist_seconds = persist_seconds
        self._memory_dir, self._disk_dir = _directories(directory)
        self._gang: Gang | None = None
        self._due = STEPS_MAX * STEPS_MAX
        self._saved_step = -1  # of the newest snapshot that this process has taken
        self._answered: Notice | None = None
        self._step_times: deque[float] = deque(maxlen=STEPS_MEASURED)
        self._last_commit: float | None = None
        self._blocked = 0.0

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._parts or hasattr(self._parts[name], "load_state_dict"):
            raise KeyError(f"{name!r} is no plain value of this Progress")
        self._parts[name] = value

    # ---- restoring ---------------------------------------------------------------------------------------------------

    def restore(self) -> int:
        """Bring all parts to the newest step that is complete and undamaged; return that step, 0 for a fresh start.

        All ranks call it, once, after the process group is initialised and before the first step.
        """
        if self._gang is not None:
            raise RuntimeError("restore() was called before: a Progress restores once, before its first step")
        begun = time.monotonic()
        notes.restoring()
        gang = find_gang(together=self._together)
        host = _host_of(self._memory_dir)
        layout = layout_of(self._parts)
        found = find(gang, self._places(gang, host), self._parts, layout, _step_to_resume())
        lines: list[tuple[str, str]] = gang.gather((secrets.token_hex(8), host))
        self._line = lines[0][0]
        self._keeper = gang.apart or [of for _, of in lines].index(host) == gang.rank
        self._layout = layout
        self._began, self._failures = time.time(), 0
        self._slots = MemorySlots(self._memory_dir, gang.rank)
        self._persisting = None if self._disk_dir is None else Persisting(self._disk_dir, gang.rank)
        self._persist_at = time.monotonic() + self._persist_seconds
        if found is not None:
            self._take_over(found)
        self._slots.forget_others()
        self._gang = gang
        self._plan_next(self._every or FIRST_AUTOMATIC)
        tier = "" if found is None else found.choice.tier.label
        notes.restored(self.restored_from, tier, time.monotonic() - begun)
        return self.step

    def _places(self, gang: Gang, host: str) -> Places:
        own = copies_in(self._memory_dir, host)
        if self._disk_dir is not None:
            own += copies_on_disk(self._disk_dir)
        directories = filter(None, os.environ.get(RESUME_FROM, "").split(os.pathsep))
        earlier = [copy for directory in directories for copy in copies_on_disk(directory)]
        if gang.apart:
            own, earlier = (
                [c for c in each if (c.header.rank, c.header.world) == (gang.rank, 1)] for each in (own, earlier)
            )
        return Places(host, self._memory_dir, tuple(own), tuple(earlier))

    def _take_over(self, found: Restored) -> None:
        content = found.content
        self._parts.update(put_back(self._parts, content["parts"]))
        if found.own:
            restore_random_state(content[RANDOM])
        self.step = self.restored_from = found.choice.step
        self._saved_step = self.step
        self._began = content["began"]
        self._failures = content["failures"] + (not found.choice.planned)
        self._slots.keep(found.choice.step, found.choice.line)

    # ---- committing --------------------------------------------------------------------------------------------------

    def commit(self, **numbers: SupportsFloat) -> None:
        """Count the step that was just taken, report it with these numbers, and save the state if that is due.

        All ranks call it after every step. If a planned change of the run is due, the state is saved at this very step
        on all ranks, and the change happens here.
        """
        if self._gang is None:
            raise RuntimeError("call restore() before the first commit()")
        self.step += 1
        for advance in self._advancing:
            advance()
        if self.step >= self._due:
            self._save_together()
        else:
            self._measure()
        report(step=self.step, **numbers)
        change = notice()
        if change is not None:
            self._leave(change)

    def _measure(self) -> None:
        moment = time.monotonic()
        if self._last_commit is not None:
            self._step_times.append(moment - self._last_commit)
        self._last_commit = moment

    def _save_together(self) -> None:
        """Take a snapshot, after the gang has agreed on the newest one that all have, and on the next interval."""
        assert self._gang is not None
        self._measure()
        begun = time.monotonic()
        newest = self._slots.newest
        sealed = -1 if newest is None or newest.step is None else newest.step
        persist = self._persisting is not None and not self._persisting.is_busy and begun >= self._persist_at
        numbers = [self.step, -self.step, sealed, int(self._slots.is_free), -self._proposed_interval(), int(persist)]
        step, last, common, free, interval, persist_all = self._gang.least(numbers)
        if step != -last:
            raise RuntimeError(
                f"this rank commits step {self.step} while others commit {step} to {-last}: all ranks of a gang"
                " must call commit() after every step, equally often"
            )
        if common >= 0:
            self._slots.keep(common, self._line)
        if free:
            self._save(planned=False)
            if persist_all:
                self._persist()
        self._blocked = time.monotonic() - begun
        notes.blocked(self._blocked)
        self._plan_next(-interval if free else 1)
        self._last_commit = time.monotonic()

    def _plan_next(self, interval: int) -> None:
        self._due = self.step + interval

    def _proposed_interval(self) -> int:
        if self._every is not None:
            return self._every
        if not self._step_times or not self._blocked:
            return FIRST_AUTOMATIC
        return steps_between(
            step_seconds=sorted(self._step_times)[len(self._step_times) // 2],
            blocked_seconds=self._blocked,
            age_seconds=time.time() - self._began,
            failures=self._failures,
        )

    def _save(self, *, planned: bool) -> None:
        """Take a snapshot of this rank. A host without room for it costs the snapshot, not the training."""
        assert self._gang is not None
        state = take(self._parts, {"began": self._began, "failures": self._failures})
        gang, keeper = self._gang, self._keeper

        def header(size: int, manifest: tuple[int, int], checksum: str) -> Header:
            return Header(
                step=self.step,
                before=self._saved_step,
                world=gang.world,
                rank=gang.rank,
                line=self._line,
                keeper=keeper,
                sharded=state.sharded and gang.world > 1,
                planned=planned,
                layout=self._layout,
                bytes=size,
                sealed_at=now(),
                algorithm=BEST,
                manifest=manifest,
                checksum=checksum,
            )

        try:
            self._slots.write(state, header=header, keeper=keeper)
        except OSError as error:
            warn("a snapshot was not taken", f"{error}; free memory on this host", "basilica.Progress")
            return
        self._saved_step = self.step
        notes.saved(self.step, "memory", sum(int(array.value.nbytes) for array in state.arrays))

    def _persist(self) -> None:
        reading = self._slots.read_newest()
        if self._persisting is None or reading is None:
            return
        if self._persisting.problem is not None:
            warn("a snapshot was not persisted", self._persisting.problem, "basilica.Progress")
        self._persisting.begin(reading)
        self._persist_at = time.monotonic() + self._persist_seconds

    # ---- planned changes ---------------------------------------------------------------------------------------------

    def _leave(self, change: Notice) -> None:
        """Save for a planned change, and wait for it. Every rank is given the notice after the same step."""
        if self._answered == change:
            return  # the program handled SIGTERM itself and goes on
        begun = time.monotonic()
        if self._saved_step != self.step:
            self._save(planned=True)
        if change.kind in LEAVING_KINDS and self._persisting is not None:
            self._persist()
            self._persisting.wait(change.seconds_left)
        notes.blocked(time.monotonic() - begun)
        self._answered = change
        change.ready()
        self._last_commit = None


def _directories(directory: str | os.PathLike[str] | None) -> tuple[str, str | None]:
    """Return the directory of snapshots in memory, and that of persistent ones."""
    if directory is not None:
        return os.path.join(directory, "memory"), os.path.join(directory, "snapshots")
    memory, disk = os.environ.get(SNAPSHOT_DIR), os.environ.get(CHECKPOINT_DIR)
    if memory is None and disk is None:
        raise ValueError("outside a deployment, say where to keep snapshots: Progress(directory='checkpoints', ...)")
    persistent = None if disk is None else os.path.join(disk, "snapshots")
    return memory or os.path.join(str(disk), "memory"), persistent


def _step_to_resume() -> int | None:
    text = os.environ.get(RESUME_STEP, "")
    return int(text) if text.isascii() and text.isdigit() else None


def _host_of(directory: str) -> str:
    """Return a text that is equal for the processes that share this directory."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    found = os.stat(directory)
    boot = ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        pass
    return f"{boot}:{found.st_dev}:{found.st_ino}"
