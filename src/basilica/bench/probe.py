"""One end of the bench: `python -m basilica.bench.probe --rank 0 --listen HOST:PORT`, and `--rank 1 --peer HOST:PORT`.

Two pods of a Job meet by name (`--listen :18790`, `--peer JOB-0.SERVICE:18790`), or through the rendezvous of their run
(`--rendezvous HOST:PORT --key RUN` for both); two processes of one machine are started by `basilica.bench.pair`.

Rank 0 leads: it says which size comes next and how often. Both write the same report, or `{"error": …}`, to
`--out` and exit 0 or 1. Whatever the other end does, a probe has ended a second after its deadline.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any, NoReturn

from basilica.bench import meet, sweep
from basilica.bench.link import Deadline, Link, ProbeError
from basilica.bench.methods import BEST_FIRST, Method, agree, method, usable
from basilica.bench.report import failure, report
from basilica.core import environment as env

DEADLINE_S = 120.0
BUDGET_S = 10.0
TOKEN = env.BENCH_TOKEN
LAST_WORDS_S = 1.0


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    options = parse(arguments)
    guard(options)
    try:
        result = measure(options)
    except ProbeError as error:
        finish(options, failure(str(error)))
    finish(options, result)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m basilica.bench.probe", description=__doc__)
    parser.add_argument("--rank", type=int, choices=(0, 1), required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--listen", type=meet.parse_address, metavar="HOST:PORT", help="rank 0: where to listen")
    where.add_argument("--peer", type=meet.parse_address, metavar="HOST:PORT", help="rank 1: where rank 0 listens")
    where.add_argument("--rendezvous", type=meet.parse_address, metavar="HOST:PORT", help="meet through its keys")
    parser.add_argument("--port-fd", type=int, metavar="FD", help="rank 0: write the port there, once it listens")
    parser.add_argument("--key", default="", help="name of the meeting place, with --rendezvous")
    parser.add_argument("--node", default=os.environ.get("NODE_NAME") or socket.gethostname())
    parser.add_argument("--method", choices=("auto", *BEST_FIRST), default="auto")
    parser.add_argument("--out", default="-", metavar="FILE", help="where the report goes; - is the standard output")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="S", help="for all of it")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help="for the measuring alone")
    options = parser.parse_args(arguments)
    if options.rendezvous is None and (options.peer is None) != (options.rank == 0):
        parser.error("rank 0 takes --listen, rank 1 takes --peer")
    if options.rendezvous is not None and not options.key:
        parser.error("--rendezvous needs --key, the same for both")
    if not (options.deadline > 0 and options.budget > 0):
        parser.error("--deadline and --budget must be above 0")
    return options


def guard(options: argparse.Namespace) -> None:
    """End this process at its deadline, whatever it is doing: a collective of torch cannot be interrupted."""

    def give_up() -> None:
        finish(options, failure(f"not done within {options.deadline:g} s"))

    timer = threading.Timer(options.deadline + LAST_WORDS_S / 2, give_up)
    timer.daemon = True
    timer.start()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, options.deadline + LAST_WORDS_S)  # should even that thread not get to run


def finish(options: argparse.Namespace, result: dict[str, Any]) -> NoReturn:
    """Write the report and leave at once: at a usual exit torch may wait for a peer that is gone."""
    problem = result.get("error")
    if problem is not None:
        sys.stderr.write(f"bench probe {options.rank}: {problem}\n")
    text = json.dumps(result, separators=(",", ":")) + "\n"
    try:
        if options.out == "-":
            sys.stdout.write(text)
        else:
            with open(options.out, "w", encoding="utf-8") as file:  # in place: it may be a container's own mount
                file.write(text)
    except OSError as error:
        problem = f"cannot write {options.out}: {error.strerror}"
        sys.stderr.write(f"bench probe {options.rank}: {problem}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if problem is None else 1)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Meet the other end, sweep, and return what both report."""
    deadline = Deadline(options.deadline)
    listener = _listener(options, deadline)  # before torch is loaded, which takes seconds
    ours = usable(options.method)
    hello = {"token": os.environ.get(TOKEN, ""), "node": options.node, "methods": ours}
    if listener is None:
        address = options.peer or meet.look_up(options.rendezvous, options.key, deadline)
        link, theirs = meet.call(address, hello, deadline)
    else:
        with closing(listener):
            link, theirs = meet.welcome(listener, hello, deadline)
    try:
        return lead(options, link, ours, theirs) if options.rank == 0 else follow(link)
    except ProbeError as error:
        with suppress(ProbeError):
            link.tell(error=str(error))
        raise


def _listener(options: argparse.Namespace, deadline: Deadline) -> socket.socket | None:
    if options.rank != 0:
        return None
    listener = meet.listen(options.listen or ("", 0))
    port = listener.getsockname()[1]
    if options.port_fd is not None:
        os.write(options.port_fd, f"{port}\n".encode())
        os.close(options.port_fd)
    if options.rendezvous is not None:
        meet.publish(options.rendezvous, options.key, port, deadline)
    return listener


def lead(options: argparse.Namespace, link: Link, ours: list[str], theirs: dict[str, Any]) -> dict[str, Any]:
    name = agree(ours, theirs.get("methods") or [])
    link.tell(method=name)
    tool = method(name, 0, link)
    swept: list[sweep.Measured] = []
    end = time.monotonic() + options.budget
    for size in sweep.SIZES:
        before = swept[-1] if swept else None
        if not sweep.fits(size, before, end - time.monotonic()):
            break
        once = min(_batch(tool, link, size, sweep.WARM_UPS))
        repeats = sweep.repeats(once, end - time.monotonic())
        swept.append(sweep.Measured(size, _batch(tool, link, size, repeats)))
    node_b = str(theirs.get("node") or "")
    result = report(name, swept, node_a=options.node, node_b=node_b, measured_at=time.time())
    link.tell(report=result)
    tool.close()
    return result


def _batch(tool: Method, link: Link, size: int, repeats: int) -> tuple[float, ...]:
    link.tell(size=size, repeats=repeats)
    return tool.times(size, repeats)


def follow(link: Link) -> dict[str, Any]:
    tool = method(str(link.hear().get("method")), 1, link)
    while True:
        order = link.hear()
        if "report" in order:
            tool.close()
            return dict(order["report"])
        tool.times(int(order["size"]), int(order["repeats"]))


if __name__ == "__main__":
    main()
