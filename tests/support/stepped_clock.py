"""A wall clock that steps for some processes only: a library that is loaded before the C library, and a file.

Only the wall clock is faked; the clocks that count are the kernel's own. (libfaketime makes `time.sleep` fail.)
"""

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class SteppedClock:
    """`environment` is for processes that are to live by it, `step` sets it, in seconds from the real wall clock."""

    def __init__(self, directory: Path) -> None:
        self._offset = directory / "offset"
        library = directory / "stepped_clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True, timeout=60)
        self.step(0)
        self.environment = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(self._offset)}

    def step(self, seconds: int) -> None:
        draft = self._offset.with_name("offset.new")
        draft.write_text(str(seconds))
        os.replace(draft, self._offset)
