"""`python -m basilica.rendezvous`: the service in the foreground, with one keyspace on a given port if asked for."""

import argparse
import asyncio
import functools
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from basilica.rendezvous.peers import is_loopback
from basilica.rendezvous.quota import UNSHARED, Quota
from basilica.rendezvous.service import RendezvousError, Service
from basilica.rendezvous.standby import Standby, served

BY_HAND = "default"


async def serve(data_dir: Path, host: str, port: int | None = None, **options: Any) -> None:
    """Serve until SIGTERM or SIGINT, or until the service is unused. One line on stdout reports that it is up."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    service = Service(data_dir, host, **options)
    await service.start()
    try:
        if port is not None:
            port = await service.open(BY_HAND, port or None)
            print(f"rendezvous: {BY_HAND} at http://{host}:{port}/v2/keys, data in {data_dir}", flush=True)
        else:
            print(f"rendezvous: {len(service.list())} keyspaces, data in {data_dir}", flush=True)
        unused = asyncio.create_task(service.unused.wait())
        unused.add_done_callback(lambda _: stopped.set())
        await stopped.wait()
        unused.cancel()
    finally:
        await service.stop()


def has_ranks(runs: Path | None, name: str) -> bool:
    """Return True if a rank of the run is alive, or if its locks cannot be read."""
    try:
        locks = {line.split()[5].rpartition(":")[2] for line in Path("/proc/locks").read_text().splitlines()}
    except (OSError, IndexError):
        return True
    try:
        return runs is None or any(str(rank.lstat().st_ino) in locks for rank in (runs / name).glob("rank-*"))
    except OSError:  # the folder is being removed or replaced
        return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m basilica.rendezvous", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, help="open a keyspace named 'default' on this port; 0 for any")
    parser.add_argument("--data-dir", type=Path, required=True, help="where keys and ports are kept")
    parser.add_argument("--linger", type=float, help="exit when nobody needs it for that many seconds")
    parser.add_argument(
        "--runs", type=Path, help="with --linger: a keyspace is needed while RUNS/NAME/rank-* is locked"
    )
    parser.add_argument(
        "--detach", action="store_true", help="run in the background, and keep ports open when the service is killed"
    )
    parser.add_argument(
        "--allow-uid",
        type=int,
        action="append",
        default=[],
        metavar="UID",
        help="on a loopback address, answer processes of this user too, besides root's and those of whoever starts it",
    )
    parser.add_argument(
        "--keyspace-bytes",
        type=int,
        default=UNSHARED.weight,
        help="how much memory the keys and values of one keyspace may take (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    os.umask(0o077)  # its files are for their owner alone
    logging.basicConfig(level=logging.WARNING, format="rendezvous: %(message)s")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket for each wait, a port and a file for each run
    if not args.detach:
        return _serve(args, None)
    if os.fork():
        os._exit(0)
    os.setsid()
    return served(functools.partial(_serve, args))


def _serve(args: argparse.Namespace, standby: Standby | None) -> int:
    options = {
        "linger": args.linger,
        "is_used": functools.partial(has_ranks, args.runs),
        "standby": standby,
        # No keyspace may take so many descriptors that the others have none.
        "quota": Quota(
            weight=args.keyspace_bytes,
            connections=min(UNSHARED.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
        ),
        # A peer from another machine or network namespace has no user here.
        "users": {0, os.getuid(), *args.allow_uid} if is_loopback(args.host) else None,
    }
    try:
        asyncio.run(serve(args.data_dir, args.host, args.port, **options))
    except RendezvousError as error:
        print(f"rendezvous: {error}", file=sys.stderr)
        return 1
    if standby is not None:
        standby.done()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
