"""`basilica serve` with a runtime that starts no processes: what remains is the control plane's own cost."""

import argparse
import asyncio
from pathlib import Path

import uvloop

from basilica.controller.plane import Settings
from basilica.machine.clocks import SteadyClock
from basilica.machine.places import STATE_FILE
from basilica.ports import Limits
from basilica.server.serve import Listen, Parts, serve
from basilica.stores.sqlite.store import SqliteStore
from basilica.testing.fake_runtime import FakeRuntime
from basilica.wiring.local import open_keys


async def main(port: int, state_dir: Path, *, finish: bool) -> None:
    store = SqliteStore(state_dir / STATE_FILE)
    await store.open()
    async with open_keys(state_dir) as keys:
        settings = Settings(limits=Limits())
        parts = Parts(store, keys, FakeRuntime(finish=finish), SteadyClock(), settings)
        await serve(parts, Listen(port=port), state_dir, lambda url: print(url, "\n", flush=True))
    await store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--port", type=int)
    parser.add_argument("--state-dir", type=Path)
    parser.add_argument("--log-level")
    parser.add_argument("--finish", action="store_true")
    options = parser.parse_args()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(main(options.port, options.state_dir, finish=options.finish))
