"""The reachability probe of a host in a run: `python -m basilica.rank.reachability --node NAME --address IP`.

A process on each host listens on the address that training uses and publishes it as `/basilica/hosts/<node>` in the
run's rendezvous. There it finds its peers, keeps a connection to each and probes it, often while a peer has a problem
and seldom while none has. `/basilica/pairs/<node>` has the results: a problem for each peer, empty if the peer answers,
written again only when it changes. A host with a name publishes the name as well: a peer that cannot resolve it does
not reach the host, even if its address answers. Standard library only.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from basilica.core import environment as env
from basilica.rendezvous.client import Answer, KeysClient
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.names import HOSTS, PAIRS
from basilica.rendezvous.retries import tries

ANSWER_WITHIN_S = 3.0
RESOLVED_WITHIN_S = 5.0
RETRY_S = 0.5
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0
RENDEZVOUS_GONE_S = 60.0
LINE_MAX = 1 << 10


class NotNeeded(Exception):
    """The run is over, or another process has taken over this host's key."""


@dataclass(frozen=True, slots=True)
class Peer:
    node: str
    address: str
    port: int
    name: str = ""


class Reach:
    """The probe of one host of one run. `patience`: seconds without a rendezvous after which the run counts as over.

    `name`: the name by which training finds this host, if not by its address.
    """

    def __init__(
        self, node: str, address: str, endpoint: str, patience: float = RENDEZVOUS_GONE_S, name: str = ""
    ) -> None:
        self._node, self._address, self._endpoint, self._patience = node, address, endpoint, patience
        self._name, self._names = name, Names()
        self._found: dict[str, str] = {}
        self._probes: dict[Peer, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Answer probes, and probe the peers, until the run is over."""
        server = await asyncio.start_server(self._answer, self._address, 0, limit=LINE_MAX)
        port = server.sockets[0].getsockname()[1]
        ours = json.dumps({"address": self._address, "port": port} | ({"name": self._name} if self._name else {}))
        publisher = asyncio.create_task(self._publish())
        try:
            with contextlib.suppress(NotNeeded):
                await self._follow_hosts(ours)
        finally:
            for task in (publisher, *self._probes.values()):
                task.cancel()
            await asyncio.gather(publisher, *self._probes.values(), return_exceptions=True)
            server.close()
            self._names.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer each probe with the name of this node."""
        with contextlib.suppress(OSError, ValueError, asyncio.CancelledError):
            while line := await reader.readline():
                word = line.decode("ascii", "replace").strip()
                writer.write(f"{word} {json.dumps(self._node)}\n".encode())
                await writer.drain()
        writer.close()

    # ---- the peers -------------------------------------------------------------------------------------------------

    async def _follow_hosts(self, ours: str) -> None:
        keys = KeysClient(self._endpoint)
        loop = asyncio.get_running_loop()
        silent_since: float | None = None
        try:
            async for _ in tries():
                try:
                    await keys.put(f"{HOSTS}/{self._node}", ours)
                    self._changed.set()  # the rendezvous may be a new one, without results
                    while True:
                        found = await keys.get(HOSTS, recursive=True)
                        silent_since = None
                        self._update_peers(found, ours)
                        await keys.wait(HOSTS, found.index + 1, recursive=True)
                except NoAnswer:
                    silent_since = loop.time() if silent_since is None else silent_since
                    if loop.time() - silent_since >= self._patience:
                        break
        finally:
            await keys.close()

    def _update_peers(self, found: Answer, ours: str) -> None:
        peers: dict[str, Peer] = {}
        for key, value in found.leaves().items():
            node = key.removeprefix(f"{HOSTS}/")
            if node == self._node and value != ours:
                raise NotNeeded
            peer = _parse(node, value)
            if peer is not None and node != self._node:
                peers[node] = peer
        for peer in [peer for peer in self._probes if peers.get(peer.node) != peer]:
            self._probes.pop(peer).cancel()
        for node in self._found.keys() - peers.keys():
            del self._found[node]
        for peer in peers.values():
            if peer not in self._probes:
                self._probes[peer] = asyncio.create_task(self._probe(peer))

    async def _probe(self, peer: Peer) -> None:
        """Probe the peer again and again."""
        connection = _Connection(peer)
        pause = FIRST_PAUSE_S
        try:
            while True:
                problem = await connection.probe() or await self._names.problem(peer.name, self._name)
                if self._found.get(peer.node) != problem:
                    self._found[peer.node] = problem
                    self._changed.set()
                    pause = FIRST_PAUSE_S
                await asyncio.sleep(RETRY_S if problem else pause)
                pause = min(pause * 2, LONGEST_PAUSE_S)
        finally:
            connection.close()

    async def _publish(self) -> None:
        keys = KeysClient(self._endpoint)
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()  # an empty result is published, too: it means that this host is up
                try:
                    await keys.put(f"{PAIRS}/{self._node}", json.dumps(self._found, sort_keys=True))
                except NoAnswer:
                    self._changed.set()
                    await asyncio.sleep(RETRY_S)
        finally:
            await keys.close()


class Names:
    """A resolver of names, one at a time and off the event loop: a silent name server blocks its caller."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "names")

    async def problem(self, *names: str) -> str:
        """Return the problem of the first name that cannot be resolved; empty if all can be."""
        for name in filter(None, names):
            try:
                async with asyncio.timeout(RESOLVED_WITHIN_S):
                    await asyncio.get_running_loop().run_in_executor(self._thread, socket.getaddrinfo, name, None)
            except TimeoutError:
                return f"cannot resolve the name {name}: no answer within {RESOLVED_WITHIN_S:g} s"
            except (OSError, UnicodeError) as error:
                why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                return f"cannot resolve the name {name}: {why.lower()}"
        return ""

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def own_name(environment: Mapping[str, str], host_name: str) -> str:
    """Return the name by which other ranks find this one, if this machine has it: rank 0's, with this rank's number.

    Pods of a run are called `<run>-<rank>.<run>`, and MASTER_ADDR is rank 0's. A process outside of such a pod has no
    name: it is found by its address.
    """
    first, dot, domain = environment.get("MASTER_ADDR", "").partition(".")
    rank = environment.get(env.RANK, "")
    mine = f"{first.removesuffix('-0')}-{rank}"
    return f"{mine}.{domain}" if dot and rank and first.endswith("-0") and mine == host_name else ""


class _Connection:
    """The connection to one peer, kept between probes."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def probe(self) -> str:
        """Probe the peer. Return its problem, in the same words while it lasts; empty if there is none."""
        kept = self._streams is not None
        problem = await self._probe_once()
        if problem and kept:  # the connection may have been cut while the network was away for a moment
            problem = await self._probe_once()
        return problem

    async def _probe_once(self) -> str:
        problem = ""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                if self._streams is None:
                    self._streams = await asyncio.open_connection(self._peer.address, self._peer.port, limit=LINE_MAX)
                reader, writer = self._streams
                word = os.urandom(8).hex()
                writer.write(f"{word}\n".encode())
                answer = await reader.readline()
                if not answer:
                    problem = "the connection was closed"
                elif answer != f"{word} {json.dumps(self._peer.node)}\n".encode():
                    problem = f"something else answers at {self._peer.address}"
        except TimeoutError:
            problem = f"no answer from {self._peer.address} within {ANSWER_WITHIN_S:g} s"
        except OSError as error:
            problem = os.strerror(error.errno).lower() if error.errno else str(error)
        except ValueError:
            problem = f"something else answers at {self._peer.address}"
        if problem:
            self.close()
        return problem

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _parse(node: str, value: str) -> Peer | None:
    try:
        about = json.loads(value)
        return Peer(node, str(about["address"]), int(about["port"]), str(about.get("name", "")))
    except (ValueError, KeyError, TypeError):
        return None


def main(argv: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    import argparse  # noqa: PLC0415 - ranks that only use `Reach` start sooner without it

    parser = argparse.ArgumentParser(
        prog="python -m basilica.rank.reachability", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--node", default=environment.get("NODE_NAME"), help="this host's name (default: NODE_NAME)")
    parser.add_argument("--address", required=True, help="this host's address for training")
    parser.add_argument(
        "--endpoint",
        default=environment.get(env.RENDEZVOUS_ENDPOINT),
        help="host:port of the rendezvous (default: BASILICA_RDZV_ENDPOINT)",
    )
    args = parser.parse_args(argv)
    if not args.node or not args.endpoint:
        print("reach: needs --node and --endpoint, or NODE_NAME and BASILICA_RDZV_ENDPOINT", file=sys.stderr)
        return 2
    try:
        name = own_name(environment, socket.gethostname())
        asyncio.run(Reach(args.node, args.address, args.endpoint, name=name).run())
    except OSError as error:
        print(f"reach: cannot listen on {args.address}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
