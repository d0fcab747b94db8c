"""The example of the README runs as it is written."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "README.md"


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["['Succeeded', 'Succeeded']", "1 x create jobs"]
