"""A gang of processes on this machine: started, watched, resized, hurt, and ended with an account of what happened.

Run it with `make demo`. It starts a control plane of its own in a temporary directory and talks to its REST API, as
curl would. `--picture FILE.svg` saves the last screen.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

# Every rank trains for a while. Rank 2 breaks once, and comes back because it has a restart left.
TRAIN = """
import os, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["BASILICA_ATTEMPT"])
for step in range(12):
    time.sleep(0.25)
    print(f"step {step} loss {2 / (step + 1):.3f}")
    if rank == 2 and attempt == 0 and step == 7:
        sys.exit("ValueError: loss is NaN")
"""
COLOURS = {
    "running": "green",
    "succeeded": "bright_green",
    "waiting": "yellow",
    "launched": "yellow",
    "stopping": "yellow",
}
WIDTH = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, help="save the last screen as SVG")
    options = parser.parse_args()
    console = Console(record=True, width=WIDTH)
    with control_plane() as api:
        created = api.post(
            "/deployments",
            json={
                "instanceName": "demo",
                "command": [sys.executable, "-u", "-c", TRAIN],
                "distributed": {"worldSize": {"min": 2, "target": 3, "max": 6}, "maxRestarts": 1},
            },
        ).json()
        name, scaled = created["instanceName"], False
        with Live(console=console, refresh_per_second=10) as live:
            for run in watch(api, name):
                live.update(screen(run))
                if run["distributed"]["worldSize"]["ready"] == 3 and not scaled:
                    scaled = True
                    api.post(f"/deployments/{name}/scale-distributed", json={"target": 5})
        events = api.get(f"/deployments/{name}/events").json()["events"]
        console.print("\n", story(events))
    if options.picture:
        console.save_svg(str(options.picture), title="make demo")
    if run["phase"] != "succeeded":
        raise SystemExit(f"the run ended as {run['phase']}: {run.get('message')}")


@contextmanager
def control_plane() -> Iterator[httpx2.Client]:
    """`basilica serve` on a free port, and a client with its key. Ctrl-C ends both, and no rank is left."""
    with tempfile.TemporaryDirectory(prefix="basilica-demo-") as state:
        argv = [sys.executable, "-m", "basilica.cli.main", "serve", "--port", "0", "--state-dir", state]
        server = subprocess.Popen([*argv, "--log-level", "warning"], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            key = (Path(state) / "api-key").read_text().strip()
            with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as api:
                try:
                    yield api
                finally:
                    for run in api.get("/deployments").json()["deployments"]:
                        api.delete(f"/deployments/{run['instanceName']}", params={"wait": 30})
        finally:
            server.terminate()
            server.wait()


def watch(api: httpx2.Client, name: str) -> Iterator[dict[str, Any]]:
    """Every state of the run, as the server sends them, until its end."""
    with api.stream("GET", f"/deployments/{name}/watch", timeout=None) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {") and line != "data: {}":
                yield json.loads(line.removeprefix("data: "))


def screen(run: dict[str, Any]) -> Group:
    gang = run["distributed"]
    world = gang["worldSize"]
    bar = "█" * world["ready"] + "░" * max(0, world["target"] - world["ready"])
    head = Text.assemble((f" {run['friendlyName']} ", "bold reverse"), f"  {run['phase']}  ", (bar, "green"))
    head.append(f"  {world['ready']} of {world['target']} ranks up (min {world['min']}, max {world['max']})")
    table = Table(expand=True, box=box.SIMPLE_HEAD)
    for column in ("rank", "state", "attempt", "restarts", "node"):
        table.add_column(column)
    for rank in gang["ranks"]:
        state = rank["state"]
        colour = COLOURS.get(state, "red")
        table.add_row(
            str(rank["rank"]),
            Text(state, colour),
            str(rank["attempt"]),
            str(rank["restarts"]),
            rank.get("nodeName", ""),
        )
    return Group(head, table, Text(gang["blockedOn"], "italic"))


def story(events: list[dict[str, Any]]) -> Table:
    table = Table(title="what happened", expand=True, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("at", "what", "in words"):
        table.add_column(column)
    for event in reversed(events):
        colour = "yellow" if event["type"] == "Warning" else ""
        table.add_row(event["last_timestamp"][11:23], Text(event["reason"], colour), event["message"])
    return table


if __name__ == "__main__":
    main()
