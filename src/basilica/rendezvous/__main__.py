"""`python -m basilica.rendezvous`: the service in the foreground, with one keyspace on a given port if asked for."""

import argparse
import asyncio
import logging
import resource
import signal
import sys
from pathlib import Path

from basilica.rendezvous.service import RendezvousError, Service

BY_HAND = "default"


async def serve(data_dir: Path, host: str, port: int | None) -> None:
    """Serve until SIGTERM or SIGINT. One line on stdout says that it is up."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    service = Service(data_dir, host)
    await service.start()
    try:
        if port is not None:
            port = await service.open(BY_HAND, port or None)
            print(f"rendezvous: {BY_HAND} at http://{host}:{port}/v2/keys, data in {data_dir}", flush=True)
        else:
            print(f"rendezvous: {len(service.list())} keyspaces, data in {data_dir}", flush=True)
        await stopped.wait()
    finally:
        await service.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m basilica.rendezvous", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, help="open a keyspace named 'default' on this port; 0 for any")
    parser.add_argument("--data-dir", type=Path, required=True, help="where keys and ports are kept")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="rendezvous: %(message)s")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket for each wait, a port and a file for each run
    try:
        asyncio.run(serve(args.data_dir, args.host, args.port))
    except RendezvousError as error:
        print(f"rendezvous: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
