"""Stacks of the Python threads of a process: from py-spy where it is installed, else from its fault handler."""

import asyncio
import os
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from basilica.core.stalls import STACK_LENGTH_MAX
from basilica.machine import files
from basilica.machine.pools import Pool
from basilica.machine.processes import lives
from basilica.reports.writer import stack_signal

PY_SPY_SECONDS = 5.0
ANSWER_SECONDS = 2.0  # for a fault handler
POLL_S = 0.01
DUMP_BYTES_MAX = 1 << 18
WHERE_LENGTH_MAX = 200

_SPIED_THREAD = re.compile(r'Thread \S+ \([^)]*\)(?:: "(?P<name>.*)")?')
_DUMPED_THREAD = re.compile(r"(?:Current thread|Thread) \S+.*\(most recent call first\):")
_DUMPED_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclass(frozen=True, slots=True)
class Stacks:
    """`where` is the innermost frame of the main thread, without directories; `text` has all threads, main first."""

    where: str = ""
    text: str = ""


NOTHING = Stacks()
Threads = list[tuple[str, list[str]]]  # names, and frames from the innermost on


async def take_stacks(pid: int, start: int, dump_file: str, pool: Pool) -> Stacks:
    """Return the stacks, empty if neither way works. The process is only read, or sent a signal that it handles."""
    threads = await _spy(pid) if lives(pid, start) else []
    if not threads:
        threads = await pool.run(ask_fault_handler, pid, start, dump_file)
    return render(threads)


def render(threads: Threads) -> Stacks:
    if not threads:
        return NOTHING
    text = "\n".join("\n".join([name, *(f"  {frame}" for frame in frames)]) for name, frames in threads)
    main = threads[0][1]
    where = re.sub(r" \(.*/", " (", main[0]) if main else ""
    return Stacks(where[:WHERE_LENGTH_MAX], text[:STACK_LENGTH_MAX])


# ---- py-spy ------------------------------------------------------------------------------------------------------


def find_py_spy() -> str | None:
    """Return py-spy on the path, or beside this Python."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


async def _spy(pid: int) -> Threads:
    program = find_py_spy()
    if program is None:
        return []
    try:
        spy = await asyncio.create_subprocess_exec(
            program,
            "dump",
            "--nonblocking",
            "--full-filenames",
            "--pid",
            str(pid),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return []
    try:
        async with asyncio.timeout(PY_SPY_SECONDS):
            output, _ = await spy.communicate()
    except TimeoutError:
        return []
    finally:
        if spy.returncode is None:
            with suppress(ProcessLookupError):
                spy.kill()
            await spy.wait()
    return parse_py_spy(output.decode("utf-8", "replace")) if spy.returncode == 0 else []


def parse_py_spy(text: str) -> Threads:
    threads: Threads = []
    for line in text.splitlines():
        if match := _SPIED_THREAD.fullmatch(line.rstrip()):
            threads.append((match["name"] or "Thread", []))
        elif threads and line.startswith("    ") and line.rstrip().endswith(")"):
            threads[-1][1].append(line.strip())
    return sorted(threads, key=lambda thread: thread[0] != "MainThread")


# ---- the fault handler -------------------------------------------------------------------------------------------


def ask_fault_handler(pid: int, start: int, dump_file: str) -> Threads:
    """Signal exactly that process to dump its stacks, if it catches the signal, which would end it otherwise."""
    number = stack_signal()
    try:
        before = _size(dump_file)  # the file exists if the process has registered its handler
        process = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return []
    try:
        if not lives(pid, start) or not catches(pid, number):
            return []
        signal.pidfd_send_signal(process, number)
    except OSError:
        return []
    finally:
        os.close(process)
    dump = _grown(dump_file, before)
    with suppress(OSError), files.opened(dump_file, os.O_WRONLY) as fd:
        os.ftruncate(fd, 0)  # the handler appends: the part that was read can go
    return parse_dump(dump)


def _grown(path: str, before: int) -> str:
    """Return the appended text once it no longer grows; empty if nothing comes in time."""
    deadline = time.monotonic() + ANSWER_SECONDS
    size = before
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        try:
            now = _size(path)
        except OSError:
            return ""
        if now == size > before:
            break
        size = now
    try:
        with files.opened(path) as fd:
            return files.read_at(fd, before, DUMP_BYTES_MAX).decode("utf-8", "replace")
    except OSError:  # the process owns the file, and may have replaced it
        return ""


def _size(path: str) -> int:
    with files.opened(path) as fd:
        return os.fstat(fd).st_size


def catches(pid: int, number: int) -> bool:
    """Return True if the process has a handler for that signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    match = re.search(r"^SigCgt:\s*([0-9a-fA-F]+)$", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


def parse_dump(text: str) -> Threads:
    """Parse a dump, whose threads are newest first, so that the main thread comes last."""
    threads: Threads = []
    for line in text.splitlines():
        if _DUMPED_THREAD.match(line):
            threads.append(("Thread", []))
        elif threads and (match := _DUMPED_FRAME.match(line)):
            threads[-1][1].append(f"{match['function']} ({match['file']}:{match['line']})")
    if threads:
        main = threads.pop()
        threads.insert(0, ("MainThread", main[1]))
    return threads
