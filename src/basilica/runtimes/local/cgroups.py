"""Control groups: those that this machine offers, and those of one rank."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from basilica.runtimes.local.task import CgroupTask

ROOT = Path("/sys/fs/cgroup")
LEAF = "basilica-server"
CPU_PERIOD_US = 100_000
CPU_QUOTA_MIN_US = 1_000
CPU_QUOTA_MAX_US = 4096 * CPU_PERIOD_US
DELEGATE = "systemd-run --user --scope -p Delegate=yes basilica serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroups:
    """The directories below which ranks get groups of their own; None where this process may use none.

    They are also the groups of this process, except in the unified hierarchy, where its group is `unified_home`.
    """

    unified: Path | None = None
    unified_home: Path | None = None
    unified_controllers: frozenset[str] = frozenset()
    memory: Path | None = None
    cpu: Path | None = None
    freezer: Path | None = None
    can_kill: bool = False
    problem: str = ""

    @property
    def limits_memory(self) -> bool:
        return self.memory is not None or "memory" in self.unified_controllers

    @property
    def limits_cpu(self) -> bool:
        return self.cpu is not None or "cpu" in self.unified_controllers


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCgroups:
    """The groups that one attempt makes and joins, and the files by which to kill it and to count memory kills."""

    tasks: tuple[CgroupTask, ...] = ()
    memory_events: str | None = None
    kill_file: str | None = None
    freezer: str | None = None


def for_rank(cgroups: Cgroups, name: str, *, memory_bytes: int | None, cpu: float | None) -> RankCgroups:
    """Return the groups of one attempt. Memory always has one: it also counts kills for a machine-wide shortage."""
    tasks: list[CgroupTask] = []
    memory_events = kill_file = freezer = None
    if cgroups.unified is not None:
        path = cgroups.unified / name
        settings = []
        if "memory" in cgroups.unified_controllers:
            memory_events = str(path / "memory.events")
            if memory_bytes is not None:
                settings += [("memory.max", str(memory_bytes)), ("memory.swap.max", "0")]
        if "cpu" in cgroups.unified_controllers and cpu is not None:
            settings.append(("cpu.max", f"{_quota(cpu)} {CPU_PERIOD_US}"))
        if cgroups.can_kill:
            kill_file = str(path / "cgroup.kill")
        limits = memory_events is not None
        home = str(cgroups.unified_home or cgroups.unified)
        tasks.append(CgroupTask(path=str(path), home=home, settings=settings, limits_memory=limits))
    if cgroups.memory is not None:
        path = cgroups.memory / name
        memory_events = str(path / "memory.oom_control")
        settings = []
        if memory_bytes is not None:
            limit = str(memory_bytes)
            settings = [("memory.limit_in_bytes", limit), ("memory.memsw.limit_in_bytes", limit)]
        tasks.append(CgroupTask(path=str(path), home=str(cgroups.memory), settings=settings, limits_memory=True))
    if cgroups.cpu is not None and cpu is not None:
        path = cgroups.cpu / name
        settings = [("cpu.cfs_period_us", str(CPU_PERIOD_US)), ("cpu.cfs_quota_us", str(_quota(cpu)))]
        tasks.append(CgroupTask(path=str(path), home=str(cgroups.cpu), settings=settings, limits_memory=False))
    if cgroups.freezer is not None and kill_file is None:
        freezer = str(cgroups.freezer / name)
        tasks.append(CgroupTask(path=freezer, home=str(cgroups.freezer), settings=[], limits_memory=False))
    return RankCgroups(tasks=tuple(tasks), memory_events=memory_events, kill_file=kill_file, freezer=freezer)


def _quota(cpu: float) -> int:
    """Return the microseconds per period, within the kernel's bounds."""
    return min(max(int(cpu * CPU_PERIOD_US), CPU_QUOTA_MIN_US), CPU_QUOTA_MAX_US)


def find(
    is_ours: Callable[[int], bool], *, root: Path = ROOT, own: str | None = None, mounts: str | None = None
) -> Cgroups:
    """Examine the machine, and make room for ranks where needed (version 2 allows processes in leaves only)."""
    try:
        own = Path("/proc/self/cgroup").read_text() if own is None else own
        mounts = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    except OSError:
        return Cgroups(problem="this system has no control groups")
    mine = dict(_own_groups(own))
    places = dict(_mounted(mounts, root))
    v1 = {kind: _usable(places, mine, kind) for kind in ("memory", "cpu", "freezer")}
    unified, controllers, problem = _unified(places, mine, is_ours)
    return Cgroups(
        unified=unified,
        unified_home=None if unified is None else _home(unified, places[""] / mine[""].lstrip("/")),
        unified_controllers=controllers,
        memory=v1["memory"],
        cpu=v1["cpu"],
        freezer=v1["freezer"],
        can_kill=unified is not None and _has_kill(unified),
        problem="" if v1["memory"] or "memory" in controllers else problem,
    )


def _own_groups(text: str) -> Iterable[tuple[str, str]]:
    """Yield (controller, path) of /proc/self/cgroup; the unified hierarchy is called ''."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _mounted(text: str, root: Path) -> Iterable[tuple[str, Path]]:
    """Yield (controller, mount point) of /proc/self/mounts, for those below `root`."""
    for line in text.splitlines():
        _, point, kind, options, *_ = line.split(" ")
        if not Path(point).is_relative_to(root):
            continue
        if kind == "cgroup2":
            yield "", Path(point)
        elif kind == "cgroup":
            for option in options.split(","):
                yield option, Path(point)


def _usable(places: Mapping[str, Path], mine: Mapping[str, str], kind: str) -> Path | None:
    """Return the group of this process in that hierarchy if groups can be made in it."""
    if kind not in places or kind not in mine:
        return None
    own = places[kind] / mine[kind].lstrip("/")
    if not own.is_dir():  # a container sees its own group at the mount point, whatever its name outside is
        own = places[kind]
    return own if _may_make_groups(own) else None


def _may_make_groups(directory: Path) -> bool:
    """Return True if a group made there can contain processes; below a threaded group it cannot."""
    probe = directory / f"basilica-probe-{os.getpid()}"
    kind = probe / "cgroup.type"
    try:
        probe.mkdir()
        useful = not kind.exists() or kind.read_text().strip() == "domain"
        probe.rmdir()
    except OSError:
        return False
    return useful


def _unified(
    places: Mapping[str, Path], mine: Mapping[str, str], is_ours: Callable[[int], bool]
) -> tuple[Path | None, frozenset[str], str]:
    """Return where to make groups in the unified hierarchy, the controllers they get, and the problem with the rest.

    The group of this process is best. Where it has foreign processes, groups beside it serve, if they can be made.
    """
    own = _usable(places, mine, "")
    if own is None:
        return None, frozenset(), f"no control group of this process may be divided; try: {DELEGATE}"
    if own.name == LEAF:  # an earlier server made room here
        own = own.parent
    offered = set((own / "cgroup.controllers").read_text().split()) & {"memory", "cpu"}
    if not offered:
        return own, frozenset(), f"the memory controller is not delegated to this process; try: {DELEGATE}"
    # Not tried in a group with processes: the kernel would allow cpu alone and make the group's children useless.
    enabled: frozenset[str] = frozenset()
    if offered <= _enabled(own) or _is_free(own) or _move_into_leaf(own, is_ours):
        enabled = _enable(own, offered)
    if "memory" in enabled:
        return own, enabled, ""
    if own != places[""] and "memory" in _enabled(own.parent) and _may_make_groups(own.parent):
        return own.parent, frozenset(_enabled(own.parent) & {"memory", "cpu"}), ""
    return own, enabled, f"other processes share the control group of this one; try: {DELEGATE}"


def _is_free(group: Path) -> bool:
    """Return True if the group may be divided: it has no process, or is the root, where processes do not matter."""
    return not (group / "cgroup.type").exists() or not (group / "cgroup.procs").read_text().split()


def _enable(group: Path, controllers: set[str]) -> frozenset[str]:
    """Enable these controllers for children of the group; return those that are enabled."""
    missing = controllers - _enabled(group)
    if missing:
        with suppress(OSError):  # the outcome is read below
            (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(missing)))
    return frozenset(_enabled(group) & controllers)


def _enabled(group: Path) -> set[str]:
    return set((group / "cgroup.subtree_control").read_text().split())


def _move_into_leaf(group: Path, is_ours: Callable[[int], bool]) -> bool:
    """Make room in the group by moving its processes one level down, if all of them are ours."""
    pids = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    if not all(is_ours(pid) for pid in pids):
        return False
    leaf = group / LEAF
    try:
        leaf.mkdir(exist_ok=True)
        for pid in pids:
            (leaf / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True


def _home(unified: Path, before: Path) -> Path:
    """Return the current group of this process: the leaf that it moved to, or its earlier group."""
    for group in (unified / LEAF, before):
        with suppress(OSError):
            if str(os.getpid()) in (group / "cgroup.procs").read_text().split():
                return group
    return unified


def _has_kill(group: Path) -> bool:
    """Return whether child groups have cgroup.kill (Linux 5.14); the root group itself has none, its children do."""
    probe = group / f"basilica-probe-{os.getpid()}"
    try:
        probe.mkdir()
        there = (probe / "cgroup.kill").exists()
        probe.rmdir()
    except OSError:
        return False
    return there
