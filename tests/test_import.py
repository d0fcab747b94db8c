"""`import basilica` is cheap: it loads nothing but the standard library."""

import subprocess
import sys

HEAVY = {"pydantic", "fastapi", "starlette", "uvicorn", "httpx2", "typer", "rich", "torch", "numpy", "asyncio"}


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, basilica; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())
