"""Capabilities of this machine for local ranks: for `basilica doctor`, and for warnings to runs that lack one."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass

from basilica.core.spec import Resources
from basilica.runtimes.local.cgroups import DELEGATE, Cgroups, find
from basilica.runtimes.local.gpus import GpuInventory, ask_nvidia_smi, runs_on_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One capability: whether it is available, its mechanism or substitute, and the remedy that would enable it."""

    name: str
    available: bool
    detail: str
    remedy: str = ""


async def examine_machine() -> tuple[Capability, ...]:
    """Return the capabilities of this machine, without a runtime on it."""
    found = await asyncio.to_thread(find, {os.getpid()}.__contains__)
    return capabilities_of(found, await ask_nvidia_smi())


def capabilities_of(cgroups: Cgroups, gpus: GpuInventory) -> tuple[Capability, ...]:
    delegate = cgroups.problem.rpartition("try: ")[2] if "try: " in cgroups.problem else DELEGATE
    remedy = delegate if sys.platform == "linux" else ""
    return (
        _memory(cgroups, remedy),
        Capability(
            name="cpu limits",
            available=cgroups.limits_cpu,
            detail="control groups" if cgroups.limits_cpu else "no limit is enforced",
            remedy="" if cgroups.limits_cpu else remedy,
        ),
        _kill(cgroups, remedy),
        Capability(
            name="exit notices",
            available=hasattr(os, "pidfd_open") or sys.platform == "darwin",
            detail="pidfd"
            if hasattr(signal, "pidfd_send_signal")
            else "kqueue"
            if sys.platform == "darwin"
            else "polling",
        ),
        Capability(
            name="identity of processes",
            available=sys.platform == "linux",
            detail="pid, start time and boot" if sys.platform == "linux" else "pid only: a reused one is mistaken",
        ),
        Capability(
            name="log rotation",
            available=sys.platform == "linux",
            detail="old parts are freed" if sys.platform == "linux" else "log files grow without bound",
        ),
        Capability(
            name="GPUs",
            available=bool(gpus.gpus),
            detail=", ".join(f"{gpu.index}: {gpu.model} {gpu.memory_gb:.0f} GB" for gpu in gpus.gpus)
            or "none: ranks that ask for any run on the CPU",
        ),
    )


def warnings_of(wanted: Resources, cgroups: Cgroups, gpus: GpuInventory) -> tuple[tuple[str, str], ...]:
    """Return a reason and a sentence for each resource that a run asked for and does not get here."""
    warnings = []
    if runs_on_cpu(gpus, wanted.gpus):
        what = "1 GPU" if wanted.gpus.count == 1 else f"{wanted.gpus.count} GPUs"
        problem = f"asked for {what} per rank; this machine has none: ranks run on the CPU"
        warnings.append(("GPUsUnavailable", problem))
    if wanted.memory_bytes is not None and not cgroups.limits_memory:
        problem = f"the memory limit holds for each process alone: {cgroups.problem}"
        warnings.append(("LimitsUnavailable", problem))
    return tuple(warnings)


def _memory(cgroups: Cgroups, remedy: str) -> Capability:
    if cgroups.limits_memory:
        how = "control groups; memory kills are recognised"
        return Capability(name="memory limits", available=True, detail=how)
    return Capability(
        name="memory limits",
        available=False,
        detail=f"per process only (RLIMIT_DATA), memory kills are not recognised: {cgroups.problem}",
        remedy=remedy,
    )


def _kill(cgroups: Cgroups, remedy: str) -> Capability:
    name = "killing whole trees"
    if cgroups.can_kill:
        return Capability(name=name, available=True, detail="cgroup.kill")
    if cgroups.freezer is not None:
        return Capability(name=name, available=True, detail="the freezer")
    if sys.platform != "linux":
        return Capability(name=name, available=False, detail="process groups only: daemons of a rank are missed")
    return Capability(name=name, available=True, detail="by walking the supervisor's descendants", remedy=remedy)
