"""Tells stories with the published client: `python -m tests.e2e.official.driver` in that client's environment.

On stdin a JSON object with who and what (see `main`); on stdout one JSON line per story as it ends: `name`, and
`seen` or `error`. Stories run side by side, since most of their time is the client's own waiting between two looks;
those that are in a hurry run before the others, with little beside them.
"""

import json
import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.e2e.official import stories
from tests.e2e.official.published import IN_A_HURRY, STORIES, VERSION, User, basilica, listen_to_warnings

HURRIED_AT_ONCE = 2


def main() -> None:
    ask = json.load(sys.stdin)
    assert ask["version"] == VERSION, f"this environment has {VERSION}, not {ask['version']}"
    assert Path(basilica.__file__).is_relative_to(sys.prefix), f"not the published client: {basilica.__file__}"
    assert stories.__doc__
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the client prints its progress
    listen_to_warnings()
    hurried = [name for name in ask["stories"] if name in IN_A_HURRY]
    others = [name for name in ask["stories"] if name not in IN_A_HURRY]
    for names, at_once in ((hurried, HURRIED_AT_ONCE), (others, ask["at_once"])):
        with ThreadPoolExecutor(at_once) as pool:
            tellings = [pool.submit(_tell, name, ask) for name in names]
            for telling in as_completed(tellings):
                print(json.dumps(telling.result()), file=results)


def _tell(name: str, ask: dict[str, Any]) -> dict[str, Any]:
    directory = Path(ask["directory"]) / name
    directory.mkdir()
    user = User(ask["url"], ask["key"], directory, ask["torchrun_path"], ask["others"])
    try:
        return {"name": name, "seen": STORIES[name](user)}
    except Exception:  # noqa: BLE001 (whatever it was, the test of this story shows it, and the others go on)
        return {"name": name, "error": traceback.format_exc()}


if __name__ == "__main__":
    main()
