"""Bench probes of tests to which it does not matter what is measured: another module is found under torch's name.

A probe imports torch before it measures, which takes seconds of processor time, as does the sweep. The variables that
`path_with` returns are for the process that starts probes.
"""

import os
from pathlib import Path

# The probe falls back to TCP, and measures a few small sizes.
QUICK = """
from basilica.bench import sweep

sweep.SIZES = sweep.SIZES[:4]
raise ImportError("no torch for this probe")
"""

# The probe has started, and stays until it is ended.
ENDLESS = """
import threading

threading.Event().wait()
"""


def waiting_for(gate: Path) -> str:
    """Return the source for a quick probe that has started, and goes on once this file is there."""
    return f"""
import pathlib, time

while not pathlib.Path({str(gate)!r}).exists():
    time.sleep(0.02)
{QUICK}"""


def path_with(torch: str, folder: Path) -> dict[str, str]:
    """Return the environment in which `import torch` executes this source, which is kept in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "torch.py").write_text(torch)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}
