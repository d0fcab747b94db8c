"""The page on samples runs as it is written."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/how-to/samples.md").read_text()


def test_the_page_runs_as_written(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 0, done.stderr
