"""The entrypoint of a rank whose control plane is far away: it runs the attempts that the run's keyspace orders.

The pod stays between attempts, so a restart is as quick as on one machine. Each attempt is claimed before it starts,
and each end is recorded in the keyspace and in the container's termination message. A keyspace that does not answer
for a while changes nothing: the rank goes on, and what has happened is told when it answers again, or again if it has
forgotten. After the time of the fence (`core.fencing`) the rank ends: another may be about to take its place.

    BASILICA_DRIVEN            1: be driven (set by the Kubernetes runtime)
    BASILICA_POD_UID           who claims
    BASILICA_TERMINATION_LOG   the file of the termination message (default /dev/termination-log)
    BASILICA_MEMORY_EVENTS     where the kernel counts kills for memory (default: of this container's cgroup)
    BASILICA_SCRATCH           a directory for the rank's result and error files (default: a temporary one)
    BASILICA_ARCHIVE…          the directory that was sent for the run, see `basilica.rank.workdir`
    BASILICA_FENCE             seconds between heartbeats, without an answer until the rank ends, and to end it
    BASILICA_RANK_ENV          variables of the rank that must not decide how this program starts, as JSON
"""

import asyncio
import base64
import contextlib
import json
import math
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from basilica import mesh
from basilica.core import environment as env
from basilica.core.commands import expanded
from basilica.core.ends import (
    CANCELLED,
    CANNOT_EXECUTE,
    NOT_FOUND,
    SHORTAGES,
    START_AGAIN_AFTER_SECONDS,
    START_AGAIN_AT_MOST_SECONDS,
    START_ERROR,
    TERMINATED,
    exit_code_of,
    killer_of,
    reason_of,
)
from basilica.core.fencing import Fence
from basilica.core.seen import Ended
from basilica.machine import files
from basilica.machine.cgroup_files import read_memory_kills
from basilica.machine.clocks import counted, steady_now
from basilica.machine.layout import Key, Layout
from basilica.rank import exec as rank_exec
from basilica.rank.entrypoint import ENDING, FORWARDED, Rank, reap_all
from basilica.rank.output import Output
from basilica.rank.reachability import Reach, borne_name
from basilica.rank.workdir import Undeliverable, deliver, without_delivery
from basilica.rendezvous.client import KeysClient
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.names import RESULTS
from basilica.rendezvous.orders import (
    AttemptRecord,
    Order,
    attempt_key,
    load_order,
    load_record,
    order_key,
)
from basilica.rendezvous.retries import opened, tries
from basilica.reports.relay import ReportTelling
from basilica.reports.tracebacks import read_traceback

MEMORY_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")  # of cgroup version 2, 1
TERMINATION_LOG = "/dev/termination-log"
MESSAGE_BYTES_MAX = 2000  # a message is cut at 4096 bytes, and some runtimes keep half of it
TRACEBACK_CHARS_MAX = 4000
RESULT_BYTES_MAX = 512 << 10
RECORDS_KEPT = 4
TELL_WITHIN_S = 10.0
ENDED_BY_PLATFORM = "Terminated"
FENCED = "Fenced"  # the reason of the end of a rank whose agent was cut off
LONG_WAIT_S = 15.0  # at the gate; before that nothing is said of it, since the log is the rank's


class Driven:
    """One rank, over all attempts that run in this container."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], scratch: Path) -> None:
        self._command, self._environment = list(command), environment
        self._scratch = Path(os.path.realpath(scratch))
        self._rank = int(environment[env.RANK])
        self._pod, self._node = environment.get(env.POD_UID, ""), environment.get("NODE_NAME", "")
        self._endpoint = environment[env.RENDEZVOUS_ENDPOINT]
        given = environment.get(env.MEMORY_EVENTS)
        self._memory_events = next((path for path in (given, *MEMORY_EVENTS) if path and os.path.exists(path)), None)
        self._instance = environment.get(env.DEPLOYMENT, "run")
        self._layout = Layout(self._scratch)
        os.makedirs(self._layout.reports(self._instance), exist_ok=True)
        self._reports = ReportTelling(self._rank, self._instance, self._layout, self._say_for_good, _log_line)
        self._order: Order | None = None
        self._ending = False  # the platform told us to end
        self._process: Rank | None = None
        self._stirred = asyncio.Event()
        self._records: dict[int, AttemptRecord] = {}
        self._untold: dict[str, str] = {}  # keys and values that the keyspace has yet to take
        self._said: dict[str, str] = {}  # what it is to know for as long as we are here
        self._news, self._told = asyncio.Event(), asyncio.Event()
        self._handled = -1  # the newest attempt that was run, or was not ours to run
        self._code = TERMINATED
        self._fence = Fence.of(environment.get(env.FENCE, ""))

    async def run(self) -> int:
        """Until the rank is done, nothing more is wanted, or the container is to end; its exit code."""
        loop = asyncio.get_running_loop()
        for number in FORWARDED:
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        works = (self._follow_orders(), self._tell(), self._reach_others(), self._keep_beating())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            return await self._serve()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self) -> int:
        while not self._ending:
            order = self._order
            if order is not None and order.run and order.attempt > self._handled:
                self._handled = order.attempt
                if await self._attempt(order):
                    break
            elif order is not None and order.leave:
                break
            else:
                await self._stir()
        await self._all_told()
        return self._code

    def _signalled(self, number: int) -> None:
        self._ending = self._ending or number in ENDING
        if self._process is not None and number not in ENDING:
            self._process.signal(number)
        self._stirred.set()

    def _reap(self) -> None:
        if self._process is None:
            reap_all()
        elif self._process.code is None:
            self._process.reap()
        self._stirred.set()

    async def _stir(self, within: float | None = None) -> None:
        """Wait until something has happened."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._stirred.wait()
        self._stirred.clear()

    async def _reach_others(self) -> None:
        """Be asked by the other ranks, and tell which of them answer. Pods of one node have addresses of their own."""
        address = self._environment.get(env.HOST_ADDRESS)
        if not address or not self._node:
            return
        try:
            # The rendezvous may be moved, and that takes its time: the run is over when this container is.
            name = borne_name(self._environment, socket.gethostname())
            await Reach(f"{self._node}/{self._rank}", address, self._endpoint, patience=math.inf, name=name).run()
        except OSError as error:
            _log_line(f"the other ranks cannot reach this one: cannot listen on {address}: {error.strerror or error}")

    # ---- one attempt -----------------------------------------------------------------------------------------------

    async def _attempt(self, order: Order) -> bool:
        """Run it, if it is ours; True if the rank has done its work, so that nothing more is to come."""
        if not await self._claim(order.attempt):
            return False
        undeliverable = await self._deliver()
        if undeliverable is None:
            await self._pass_the_gate(order.attempt)
        if undeliverable is not None:
            ended = undeliverable
        elif reason := self._reason_to_end(order.attempt):
            stopped = reason == CANCELLED
            ended = Ended(
                exit_code=None, reason=reason, finished_at=steady_now(), stopped=stopped, by_platform=not stopped
            )
        else:
            ended = await self._execute(order)
        self._tell_result()
        self._say_again()  # first: whoever knows of the end may look for it
        self._record(order.attempt, ended=ended)
        self._leave_message(order.attempt)
        done = ended.exit_code == 0 and not ended.stopped and not ended.by_platform
        self._code = 0 if done else ended.exit_code or TERMINATED  # 0 would tell Kubernetes that the rank is done
        return done

    async def _claim(self, attempt: int) -> bool:
        """Whether this attempt is ours. It may have been stopped already, or belong to another pod of the rank."""
        record = AttemptRecord(pod=self._pod, node=self._node, claimed_at=steady_now())
        async with opened(self._endpoint) as keys:
            async for _ in tries():
                if self._is_to_end(attempt):
                    return False
                with contextlib.suppress(NoAnswer):
                    await self._beat(keys)  # first: from now on the rendezvous counts on us
                    key = attempt_key(self._rank, attempt)
                    answer = await keys.put(key, record.dump(), prev_exist=False)
                    if not answer.ok:  # perhaps by our own claim, whose answer was lost
                        found = load_record(str((await keys.get(key)).node.get("value", "")))
                        if found is None:
                            continue
                        if found.pod != self._pod or found.ended is not None:
                            return False
                        record = found
                    self._records[attempt] = record
                    await self._reports.learn(keys)
                    return True
        return False

    async def _deliver(self) -> Ended | None:
        """Be in the directory that was sent for the run, if there is one; how the attempt ended if that cannot be."""
        try:
            place = await asyncio.to_thread(deliver, self._environment)
            if place is not None:
                os.chdir(place)  # and so all that we start
        except (Undeliverable, OSError) as error:
            return _cannot_start(str(error), CANNOT_EXECUTE)
        return None

    async def _pass_the_gate(self, attempt: int) -> None:
        timeout = float(self._environment.get(env.MESH_TIMEOUT, mesh.DEFAULT_SECONDS))
        loop = asyncio.get_running_loop()
        began = loop.time()
        reminder = loop.call_later(LONG_WAIT_S, _log_line, "waiting until enough ranks are there and reach each other")
        gate = asyncio.create_task(mesh.wait_saying(lambda _: None, timeout))
        gate.add_done_callback(lambda _: self._stirred.set())
        while not gate.done() and not self._reason_to_end(attempt):
            await self._stir(self._until_fenced())
        reminder.cancel()
        if gate.done():
            _tell_of_the_gate(loop.time() - began)
        gate.cancel()
        await asyncio.gather(gate, return_exceptions=True)

    def _is_to_end(self, attempt: int) -> bool:
        """An order for a later attempt says that this one was given up: there must not be two."""
        order = self._order
        if order is None or order.attempt < attempt:
            return self._ending
        return self._ending or order.attempt > attempt or not order.run

    def _reason_to_end(self, attempt: int) -> str:
        if self._is_to_end(attempt):
            return ENDED_BY_PLATFORM if self._ending else CANCELLED
        return FENCED if self._fence is not None and self._fence.closed(counted()) else ""

    async def _execute(self, order: Order) -> Ended:
        environment = self._rank_environment(order)
        for name in (env.RESULT_FILE, env.TORCH_ERROR_FILE):
            with contextlib.suppress(OSError):
                files.remove(environment[name])  # of an earlier attempt
        kills = self._memory_kills()
        command, output = expanded(self._command, environment), Output()
        rank_exec.tell(environment)
        try:
            rank = self._process = await self._start(order.attempt, command, environment, output)
        except OSError as error:
            output.started()
            output.finish()
            return _start_error(command[0], error)
        output.started()
        self._record(order.attempt, started_at=rank.started_at)
        self._reports.begin(order.attempt, int(environment[env.TORCH_WORLD_SIZE]))
        reports = asyncio.create_task(self._reports.keep_telling())
        cause = await self._until_it_ends(order.attempt, rank)
        self._process = None
        reports.cancel()
        self._reports.finish()
        assert rank.code is not None
        exit_code, killer = exit_code_of(rank.code), killer_of(rank.code)
        stopped, by_platform = cause == CANCELLED, cause in (ENDED_BY_PLATFORM, FENCED)
        if by_platform and exit_code == 0:
            exit_code = TERMINATED  # it ended well because it had to: its work is not done
        reason = cause or reason_of(exit_code, killer, memory_kills=self._memory_kills() - kills)
        failed = not stopped and exit_code != 0
        tail = output.finish()
        return Ended(
            exit_code=exit_code,
            reason=reason,
            finished_at=steady_now(),
            signal=killer,
            stopped=stopped,
            by_platform=by_platform,
            log_tail=(*tail, self._fenced_line()) if cause == FENCED else tail,
            traceback=read_traceback(environment[env.TORCH_ERROR_FILE])[-TRACEBACK_CHARS_MAX:] if failed else "",
        )

    async def _start(self, attempt: int, command: list[str], environment: Mapping[str, str], output: Output) -> Rank:
        """Start the rank. A shortage that passes is waited for, as long as the rank is wanted; else `OSError`."""
        pause = START_AGAIN_AFTER_SECONDS
        while True:
            try:
                return Rank(command, environment, output.writing)
            except OSError as error:
                if error.errno not in SHORTAGES or self._reason_to_end(attempt):
                    raise
                _log_line(f"cannot start {command[0]} now, again in {pause:g} s: {error.strerror}")
            await self._stir(pause)
            pause = min(2 * pause, START_AGAIN_AT_MOST_SECONDS)

    async def _until_it_ends(self, attempt: int, rank: Rank) -> str:
        """Why it had to end before it did: by an order, by the platform, by the fence; empty if it ended by itself."""
        kill_at: float | None = None
        cause = ""
        while rank.code is None:
            now = counted()
            reason = self._reason_to_end(attempt)
            if reason and not cause:
                cause = reason
                rank.signal(signal.SIGTERM)
                if cause == FENCED:
                    _log_line(self._fenced_line())
            if cause == CANCELLED and self._order is not None:
                kill_at = _earlier(kill_at, now + self._order.grace)
            if self._fence is not None and (cause == FENCED or self._fence.closed(now)):
                kill_at = _earlier(kill_at, now + self._fence.grace)  # whoever had told it to end
            if kill_at is not None and now >= kill_at:
                rank.kill()
            await self._stir(self._until_fenced() if kill_at is None else max(0.05, kill_at - now))
        return cause

    def _rank_environment(self, order: Order) -> dict[str, str]:
        world = int(order.world or self._environment.get(env.WORLD_TARGET, "1"))
        result, error = str(self._scratch / "result"), str(self._scratch / "error")
        return {
            **without_delivery(self._environment),
            **env.attempt_environment(self._rank, order.attempt, world, result_file=result, error_file=error),
            env.WORLD_TARGET: str(world),
            env.REPORT_FILE: self._layout.report(Key(self._instance, self._rank, order.attempt)),
        }

    def _memory_kills(self) -> int:
        return read_memory_kills(self._memory_events)

    # ---- what is told ----------------------------------------------------------------------------------------------

    def _record(self, attempt: int, *, started_at: float | None = None, ended: Ended | None = None) -> None:
        before = self._records[attempt]
        self._records[attempt] = replace(before, started_at=started_at or before.started_at, ended=ended)
        while len(self._records) > RECORDS_KEPT:
            del self._records[min(self._records)]
        self._say(attempt_key(self._rank, attempt), self._records[attempt].dump())

    def _say(self, key: str, value: str) -> None:
        self._untold.pop(key, None)
        self._untold[key] = value  # after all that came before
        self._told.clear()
        self._news.set()

    def _say_for_good(self, key: str, value: str) -> None:
        """Also to a keyspace that has lost it."""
        self._said[key] = value
        self._say(key, value)

    def _say_again(self) -> None:
        for key, value in self._said.items():
            self._say(key, value)

    def _tell_result(self) -> None:
        try:
            result = files.read(str(self._scratch / "result"), RESULT_BYTES_MAX)
        except FileNotFoundError:
            return
        except OSError as error:
            _log_line(f"the result is not kept: {error}")
            return
        self._say_for_good(f"{RESULTS}/{self._rank}", base64.b64encode(result).decode())

    def _leave_message(self, attempt: int) -> None:
        """For whoever finds the container and no keyspace. Lines are left out until it fits."""
        record = self._records[attempt]
        assert record.ended is not None
        ended = replace(record.ended, traceback="")
        while True:
            text = f'{{"basilica": {attempt}, "record": {replace(record, ended=ended).dump()}}}'
            if len(text.encode()) <= MESSAGE_BYTES_MAX or not ended.log_tail:
                break
            ended = replace(ended, log_tail=ended.log_tail[1:])
        with contextlib.suppress(OSError):
            path = self._environment.get(env.TERMINATION_LOG, TERMINATION_LOG)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | files.SAFELY, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(text)

    async def _tell(self) -> None:
        """Write what is new to the keyspace, as often as it takes."""
        async with opened(self._endpoint) as keys:
            async for again in tries():
                try:
                    while self._untold:
                        key, value = next(iter(self._untold.items()))
                        await keys.put(key, value)
                        if self._untold.get(key) == value:
                            del self._untold[key]
                    self._told.set()
                    await self._news.wait()
                    self._news.clear()
                    again.at_once = True
                except NoAnswer:
                    continue

    async def _all_told(self) -> None:
        """Wait until the keyspace knows all, or so long that it is probably gone; the message remains."""
        if self._untold:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_WITHIN_S):
                    await self._told.wait()

    # ---- heartbeats ------------------------------------------------------------------------------------------------

    async def _keep_beating(self) -> None:
        """Let the rendezvous hear of us, and hear from it that it is there."""
        while self._fence is not None:
            async with opened(self._endpoint) as keys:
                async for again in tries():
                    with contextlib.suppress(NoAnswer):
                        if not await self._beat(keys):
                            return
                        await asyncio.sleep(self._fence.heartbeat)
                        again.at_once = True

    async def _beat(self, keys: KeysClient) -> bool:
        """One heartbeat; False if nobody takes any here, so that nobody counts on the fence."""
        fence = self._fence
        if fence is None:
            return False
        sent = counted()
        if await keys.heartbeat(
            self._pod or f"rank-{self._rank}", fence.heartbeat, fence.silence(sent), within=fence.heartbeat
        ):
            fence.answered(sent)
            return True
        self._fence = None
        return False

    def _until_fenced(self) -> float | None:
        """Seconds until the fence closes, unless an answer comes before."""
        end = None if self._fence is None else self._fence.ends_at()
        now = counted()
        return None if end is None or end <= now else end - now + 0.01

    def _fenced_line(self) -> str:
        silence = (self._fence.silence(counted()) if self._fence is not None else None) or 0.0
        return (
            f"the run's rendezvous has not answered for {silence:.0f} s: this node may be cut off, and another rank in "
            f"the place of rank {self._rank}; it ends ({FENCED})"
        )

    # ---- orders ----------------------------------------------------------------------------------------------------

    async def _follow_orders(self) -> None:
        """Whatever was forgotten by a keyspace that was lost is told again, before anybody asks."""
        key = order_key(self._rank)
        async with opened(self._endpoint) as keys:
            async for again in tries():
                with contextlib.suppress(NoAnswer):
                    found = await keys.get(key)
                    if found.index == 0:
                        continue
                    self._say_again()
                    for attempt, record in self._records.items():
                        self._say(attempt_key(self._rank, attempt), record.dump())
                    index = found.index
                    while found.ok or found.status == 404:
                        self._obey(str(found.node.get("value", "")))
                        found = await keys.wait(key, index + 1)
                        index = int(found.node.get("modifiedIndex", index))
                    again.at_once = True  # the history does not go back so far: look again

    def _obey(self, text: str) -> None:
        order = load_order(text)
        if order is not None and order != self._order and order.attempt >= self._handled_or_ordered():
            self._order = order
            self._stirred.set()

    def _handled_or_ordered(self) -> int:
        return self._handled if self._order is None else max(self._handled, self._order.attempt)


def _tell_of_the_gate(seconds: float) -> None:
    """What somebody who reads the log of the rank may wonder about; nothing if all went well and quickly."""
    match mesh.mesh_status():
        case "degraded":
            _log_line("not all hosts reach each other: the rank starts all the same (basilica train why says which)")
        case "timeout":
            _log_line(
                f"within {seconds:.0f} s nobody said that the hosts reach each other: the rank starts all the same"
            )
        case "ready" if seconds >= LONG_WAIT_S:
            _log_line(f"the rank starts after {seconds:.0f} s")
        case _:
            pass


def _earlier(known: float | None, moment: float) -> float:
    return moment if known is None else min(known, moment)


def _log_line(text: str) -> None:
    print(f"basilica: {text}", file=sys.stderr, flush=True)


def _start_error(program: str, error: OSError) -> Ended:
    code = NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
    return _cannot_start(f"cannot execute {program}: {error.strerror}", code)


def _cannot_start(sentence: str, code: int) -> Ended:
    _log_line(sentence)
    return Ended(exit_code=code, reason=START_ERROR, finished_at=steady_now(), start_error=sentence)


def main(command: Sequence[str]) -> int:
    missing = [name for name in (env.RANK, env.RENDEZVOUS_ENDPOINT) if not os.environ.get(name)]
    if missing:
        _log_line(f"to be driven needs {' and '.join(missing)}")
        return 2
    os.environ.update(
        json.loads(os.environ.pop(env.RANK_ENV, "{}"))
    )  # we have started: what they decide is ours no more
    with tempfile.TemporaryDirectory(prefix="basilica-rank-") as temporary:
        scratch = Path(os.environ.get(env.SCRATCH, temporary)).absolute()

        async def drive() -> int:
            return await Driven(command, os.environ, scratch).run()

        try:
            return asyncio.run(drive())
        finally:
            rank_exec.forget()
