"""The system calls of a program, by strace: which file each was about, in the order in which they were made."""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEEN = "trace=write,pwrite64,pwritev,writev,fsync,fdatasync,msync"
_CALL = re.compile(r"^(\d+)\s+(\w+)\(\d+<(.*?)>(.*)$")


@dataclass(frozen=True)
class Call:
    pid: int
    name: str
    path: str
    rest: str

    @property
    def syncs(self) -> bool:
        return self.name in ("fsync", "fdatasync")

    @property
    def writes(self) -> bool:
        return "write" in self.name


def traced(script: str, folder: Path, arguments: Sequence[str | Path] = ()) -> list[Call]:
    """Run a Python program, and all that it starts, to its end."""
    out = folder / "calls"
    command = ["strace", "-f", "-y", "-s", "256", "-e", SEEN, "-o", str(out)]
    subprocess.run([*command, sys.executable, "-c", script, *map(str, arguments)], check=True, timeout=100)
    found = [_CALL.match(line) for line in out.read_text(errors="replace").splitlines()]
    return [Call(int(m[1]), m[2], m[3], m[4]) for m in found if m is not None]
