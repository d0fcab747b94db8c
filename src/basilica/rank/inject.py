"""The injection of the entrypoint into images without it: `python -m basilica.rank.inject DIRECTORY`.

It copies this package to the directory, and `start`, which runs `basilica.entrypoint` with the Python of its image.
An init container does this on a volume that it shares with the rank, so that any image with Python 3.11 will do. The
package's entry point goes along, by which a torchrun of that image finds the backend `basilica`.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from basilica.rendezvous.torch_handler import ENTRY_POINT
from basilica.version import __version__

LEFT_OUT = ("__pycache__", "console", "testing")  # no rank needs them

START = """\
#!/bin/sh
for python in python3 python; do
    if command -v "$python" >/dev/null 2>&1; then exec "$python" "$0.py" "$@"; fi
done
echo "basilica: this image has no Python on its PATH, and ranks need Python 3.11 or later" >&2
exit 127
"""

# Every version of Python must be able to parse this, to print that it is too old.
START_PY = """\
import sys

if sys.version_info < (3, 11):
    found = "%d.%d" % tuple(sys.version_info[:2])
    sys.stderr.write("basilica: this image has Python " + found + ", and ranks need 3.11 or later\\n")
    sys.exit(126)

import importlib.util
import os

carried = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")
del sys.path[0]
if importlib.util.find_spec("basilica") is None:  # a copy in the image goes before ours in the rank's program
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), carried]))
sys.path.insert(0, carried)

from basilica.rank.entrypoint import main

sys.exit(main())
"""


def carry(directory: Path) -> None:
    """Write `start` and all that it needs to the directory."""
    package = Path(__file__).resolve().parents[1]
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(package, directory / "lib" / "basilica", ignore=ignored, dirs_exist_ok=True)
    # A name of its own: for pip, basilica is not installed there.
    metadata = directory / "lib" / f"basilica_carried-{__version__}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: basilica-carried\nVersion: {__version__}\n")
    (metadata / "entry_points.txt").write_text("[{}]\n{} = {}\n".format(*ENTRY_POINT))
    (directory / "start.py").write_text(START_PY, encoding="utf-8")
    start = directory / "start"
    start.write_text(START, encoding="utf-8")
    start.chmod(0o755)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    carry(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
