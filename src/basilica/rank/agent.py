"""The agent of a rank whose control plane is remote: it runs the attempts that the run's keyspace orders.

The pod stays between attempts, so a restart is as quick as on one machine. Each attempt is claimed before it starts,
and each end is recorded in the keyspace (`rank.publisher`) and in the container's termination message
(`rank.termination`). The rank goes on while the keyspace does not answer, until the fence closes (`rank.heartbeat`).

    BASILICA_DRIVEN            1: run as the agent (set by the Kubernetes runtime)
    BASILICA_POD_UID           the claimant of attempts
    BASILICA_TERMINATION_LOG   the file of the termination message (default /dev/termination-log)
    BASILICA_MEMORY_EVENTS     the kernel's count of kills for memory (default: of this container's cgroup)
    BASILICA_SCRATCH           a directory for the rank's result and error files (default: a temporary one)
    BASILICA_ARCHIVE…          the directory that was sent for the run, see `basilica.rank.workdir`
    BASILICA_FENCE             seconds between heartbeats, without an answer until the rank ends, and to end it
    BASILICA_NOTICE_SECONDS    seconds that a rank which reads notices goes on after the platform's signal (default 0)
    BASILICA_GRACE_SECONDS     seconds to end after the SIGTERM that follows, else it is killed (default: no limit)
    BASILICA_NOTICE_SIGNAL     SIGUSR1 or SIGUSR2: the signal that tells the rank of a new notice (default: none)
    BASILICA_RANK_ENV          variables of the rank that must not decide how this program starts, as JSON
"""

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from basilica import mesh
from basilica.core import environment as env
from basilica.core.commands import expanded
from basilica.core.ends import (
    CANCELLED,
    CANNOT_EXECUTE,
    ENDED_BY_PLATFORM,
    FENCED,
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
from basilica.rank.activity_relay import ActivityRelay
from basilica.rank.departure import Departure
from basilica.rank.entrypoint import ENDING, FORWARDED, Rank, reap_all
from basilica.rank.gate import Gate
from basilica.rank.heartbeat import Heartbeat
from basilica.rank.log import log
from basilica.rank.notice_relay import SIGNALS, NoticeRelay, pids_to_signal
from basilica.rank.order_watch import OrderWatch
from basilica.rank.output import Output
from basilica.rank.publisher import Publisher
from basilica.rank.reachability import Reach, own_name
from basilica.rank.termination import write_termination_message
from basilica.rank.workdir import Undeliverable, deliver, make_checkpoint_directory, without_delivery
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.orders import AttemptRecord, Order, attempt_key, load_record
from basilica.rendezvous.retries import opened, tries
from basilica.reports.relay import ReportRelay
from basilica.reports.tracebacks import read_traceback

MEMORY_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")  # of cgroup version 2, 1
TRACEBACK_CHARS_MAX = 4000


class Agent:
    """The agent of one rank, over all attempts that run in this container."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], scratch: Path) -> None:
        self._command, self._environment = list(command), environment
        self._scratch = Path(os.path.realpath(scratch))
        self._result_path = self._scratch / "result"
        self._rank = int(environment[env.RANK])
        self._pod, self._node = environment.get(env.POD_UID, ""), environment.get("NODE_NAME", "")
        self._endpoint = environment[env.RENDEZVOUS_ENDPOINT]
        self._publisher = Publisher(self._endpoint, self._rank)
        sender, fence = self._pod or f"rank-{self._rank}", Fence.of(environment.get(env.FENCE, ""))
        self._heartbeat = Heartbeat(self._endpoint, sender, self._rank, fence)
        given = environment.get(env.MEMORY_EVENTS)
        self._memory_events = next((path for path in (given, *MEMORY_EVENTS) if path and os.path.exists(path)), None)
        self._instance = environment.get(env.DEPLOYMENT, "run")
        self._layout = Layout(self._scratch)
        os.makedirs(self._layout.reports(self._instance), exist_ok=True)
        self._reports = ReportRelay(self._rank, self._instance, self._layout, self._publisher.publish_lasting, log)
        self._orders = OrderWatch(self._endpoint, self._rank, self._publisher.publish_all_again, self._wake)
        self._activity = ActivityRelay(
            self._rank, self._instance, self._layout, self._publisher.publish_lasting, self._activity_changed
        )
        self._notice_path = str(self._scratch / "notice")
        self._notices = NoticeRelay(self._endpoint, self._notice_path, self._signal_notice)
        self._notice_signal = SIGNALS.get(environment.get(env.NOTICE_SIGNAL, ""))
        self._grace = _seconds(environment, env.GRACE_SECONDS, math.inf)
        self._departure = Departure(_seconds(environment, env.NOTICE_SECONDS, 0.0))
        self._process: Rank | None = None
        self._woken = asyncio.Event()
        self._code = TERMINATED

    async def run(self) -> int:
        """Run until the rank is done, no further attempt is wanted, or the container must end; return its exit code."""
        loop = asyncio.get_running_loop()
        for number in FORWARDED:
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        if self._notice_signal is not None:
            self._notices.watch()
        works = (
            self._orders.run(),
            self._notices.run(),
            self._publisher.run(),
            self._probe_others(),
            self._heartbeat.run(),
        )
        tasks = [asyncio.create_task(work) for work in works]
        try:
            return await self._serve()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._activity.close()

    async def _serve(self) -> int:
        while not self._departure.told:
            if (order := self._orders.next_attempt()) is not None:
                if await self._attempt(order):
                    break
            elif self._orders.order is not None and self._orders.order.leave:
                break
            else:
                await self._wait()
        await self._publisher.flush()  # the termination message remains if the keyspace is gone
        return self._code

    def _wake(self) -> None:
        self._woken.set()

    def _signalled(self, number: int) -> None:
        if number not in ENDING:
            if self._process is not None:
                self._process.signal(number)
        elif self._departure.tell(counted(), listens=self._listens):
            self._activity.leave(self._departure.leaving(steady_now()))
        self._woken.set()

    @property
    def _listens(self) -> bool:
        """Whether a process of the rank reads notices."""
        return self._process is not None and self._activity.activity.answer is not None

    def _activity_changed(self) -> None:
        if self._listens:
            self._notices.watch()
        self._woken.set()

    def _signal_notice(self) -> None:
        """Signal the rank that there is a new notice, where the run asks for it."""
        if self._process is None or self._notice_signal is None:
            return
        for pid in pids_to_signal(self._process.pid, self._activity.activity.agent):
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, self._notice_signal)

    def _reap(self) -> None:
        if self._process is None:
            reap_all()
        elif self._process.code is None:
            self._process.reap()
        self._woken.set()

    async def _wait(self, within: float | None = None) -> None:
        """Wait for a signal, an order, the end of a process or of the gate, `within` seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._woken.wait()
        self._woken.clear()

    async def _probe_others(self) -> None:
        """Answer the probes of the other ranks and publish which of them answer. Each pod has an address of its own."""
        address = self._environment.get(env.HOST_ADDRESS)
        if not address or not self._node:
            return
        try:
            # No limit: a rendezvous that moves is away for a while, and the run is over only when this container is.
            name = own_name(self._environment, socket.gethostname())
            await Reach(f"{self._node}/{self._rank}", address, self._endpoint, patience=math.inf, name=name).run()
        except OSError as error:
            log(f"the other ranks cannot reach this one: cannot listen on {address}: {error.strerror or error}")

    # ---- one attempt -----------------------------------------------------------------------------------------------

    async def _attempt(self, order: Order) -> bool:
        """Claim and run the attempt. True if the rank has done its work, so that no attempt follows."""
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
        self._publisher.publish_result(self._result_path)
        self._publisher.publish_lasting_again()  # before the record: a reader of the end may fetch the result at once
        record = self._publisher.record(order.attempt, ended=ended)
        write_termination_message(self._environment, order.attempt, record)
        done = ended.exit_code == 0 and not ended.stopped and not ended.by_platform
        self._code = 0 if done else ended.exit_code or TERMINATED  # to Kubernetes, 0 means that the rank is done
        return done

    async def _claim(self, attempt: int) -> bool:
        """Claim the attempt. False if it was stopped already, or belongs to another pod of the rank."""
        record = AttemptRecord(pod=self._pod, node=self._node, claimed_at=steady_now())
        async with opened(self._endpoint) as keys:
            async for _ in tries():
                if self._is_to_end(attempt):
                    return False
                with contextlib.suppress(NoAnswer):
                    await self._heartbeat.send(
                        keys
                    )  # first: the rendezvous watches this agent before it has an attempt
                    key = attempt_key(self._rank, attempt)
                    answer = await keys.put(key, record.dump(), prev_exist=False)
                    if not answer.ok:  # perhaps claimed by this agent, and the answer was lost
                        found = load_record(str((await keys.get(key)).node.get("value", "")))
                        if found is None:
                            continue
                        if found.pod != self._pod or found.ended is not None:
                            return False
                        record = found
                    self._publisher.add_claimed(attempt, record)
                    await self._reports.load_earlier(keys)
                    return True
        return False

    async def _deliver(self) -> Ended | None:
        """Change to the directory that was sent for the run, if any. Return the end of the attempt if that fails."""
        try:
            place = await asyncio.to_thread(deliver, self._environment)
            if place is not None:
                os.chdir(place)  # of this process, and so of all that it starts
        except (Undeliverable, OSError) as error:
            return _cannot_start(str(error), CANNOT_EXECUTE)
        return None

    async def _pass_the_gate(self, attempt: int) -> None:
        timeout = float(self._environment.get(env.MESH_TIMEOUT, mesh.DEFAULT_SECONDS))
        gate = Gate(timeout, self._wake)
        while not gate.passed and not self._reason_to_end(attempt):
            await self._wait(self._heartbeat.until_fenced())
        await gate.close()

    def _is_to_end(self, attempt: int) -> bool:
        return self._orders.ends(attempt) or self._departure.is_due(counted(), listens=self._listens)

    def _reason_to_end(self, attempt: int) -> str:
        if self._is_to_end(attempt):
            return ENDED_BY_PLATFORM if self._departure.told else CANCELLED
        return FENCED if self._heartbeat.fenced else ""

    async def _execute(self, order: Order) -> Ended:
        environment = self._rank_environment(order)
        make_checkpoint_directory(environment)
        for name in (env.RESULT_FILE, env.TORCH_ERROR_FILE):
            with contextlib.suppress(OSError):
                files.remove(environment[name])  # of an earlier attempt
        kills = self._memory_kills()
        command, output = expanded(self._command, environment), Output()
        rank_exec.record_environment(environment)
        self._activity.begin(order.attempt, output.tail)
        try:
            rank = self._process = await self._start(order.attempt, command, environment, output)
        except OSError as error:
            output.started()
            output.finish()
            return _start_error(command[0], error)
        output.started()
        self._publisher.record(order.attempt, started_at=rank.started_at)
        self._reports.begin(order.attempt, int(environment[env.TORCH_WORLD_SIZE]))
        relays = [asyncio.create_task(relay.run()) for relay in (self._reports, self._activity)]
        cause = await self._wait_for_end(order.attempt, rank)
        self._process = None
        for task in relays:
            task.cancel()
        self._reports.finish()
        await self._activity.finish()  # before the end of the output: a failed worker is shown with it
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
            log_tail=(*tail, self._heartbeat.fenced_line()) if cause == FENCED else tail,
            traceback=read_traceback(environment[env.TORCH_ERROR_FILE])[-TRACEBACK_CHARS_MAX:] if failed else "",
        )

    async def _start(self, attempt: int, command: list[str], environment: Mapping[str, str], output: Output) -> Rank:
        """Start the rank; retry after a shortage that passes, while the attempt is wanted; else raise `OSError`."""
        pause = START_AGAIN_AFTER_SECONDS
        while True:
            try:
                return Rank(command, environment, output.writing)
            except OSError as error:
                if error.errno not in SHORTAGES or self._reason_to_end(attempt):
                    raise
                log(f"cannot start {command[0]} now, again in {pause:g} s: {error.strerror}")
            await self._wait(pause)
            pause = min(2 * pause, START_AGAIN_AT_MOST_SECONDS)

    async def _wait_for_end(self, attempt: int, rank: Rank) -> str:
        """Return why the rank had to end: an order, the platform or the fence; empty if it ended by itself."""
        kill_at: float | None = None
        cause = ""
        while rank.code is None:
            now = counted()
            reason = self._reason_to_end(attempt)
            if reason and not cause:
                cause = reason
                rank.signal(signal.SIGTERM)
                if cause == FENCED:
                    log(self._heartbeat.fenced_line())
            if cause == CANCELLED and self._orders.order is not None:
                kill_at = _earlier(kill_at, now + self._orders.order.grace)
            if cause == ENDED_BY_PLATFORM and kill_at is None and self._grace < math.inf:
                kill_at = now + self._grace
            if cause == FENCED or self._heartbeat.fenced:
                kill_at = _earlier(kill_at, now + self._heartbeat.grace)  # whatever the first cause was
            if kill_at is not None and now >= kill_at:
                rank.kill()
            delays = [self._heartbeat.until_fenced(), self._departure.due_in(now)]
            delays = delays if kill_at is None else [max(0.05, kill_at - now)]
            await self._wait(min((delay for delay in delays if delay is not None), default=None))
        return cause

    def _rank_environment(self, order: Order) -> dict[str, str]:
        world = int(order.world or self._environment.get(env.WORLD_TARGET, "1"))
        result, error = str(self._result_path), str(self._scratch / "error")
        return {
            **without_delivery(self._environment),
            **env.attempt_environment(self._rank, order.attempt, world, result_file=result, error_file=error),
            env.WORLD_TARGET: str(world),
            env.REPORT_FILE: self._layout.report(Key(self._instance, self._rank, order.attempt)),
            env.REPORT_BELL: self._activity.bell,
            env.NOTICE_FILE: self._notice_path,
            **({} if self._memory_events is None else {env.MEMORY_EVENTS: self._memory_events}),
        }

    def _memory_kills(self) -> int:
        return read_memory_kills(self._memory_events)


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    try:
        found = float(environment.get(name) or default)
    except ValueError:
        return default
    return found if found >= 0.0 else default  # no NaN


def _earlier(known: float | None, moment: float) -> float:
    return moment if known is None else min(known, moment)


def _start_error(program: str, error: OSError) -> Ended:
    code = NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
    return _cannot_start(f"cannot execute {program}: {error.strerror}", code)


def _cannot_start(sentence: str, code: int) -> Ended:
    log(sentence)
    return Ended(exit_code=code, reason=START_ERROR, finished_at=steady_now(), start_error=sentence)


def main(command: Sequence[str]) -> int:
    missing = [name for name in (env.RANK, env.RENDEZVOUS_ENDPOINT) if not os.environ.get(name)]
    if missing:
        log(f"to be driven needs {' and '.join(missing)}")
        return 2
    # From here on these variables affect the rank only: this interpreter has started.
    os.environ.update(json.loads(os.environ.pop(env.RANK_ENV, "{}")))
    with tempfile.TemporaryDirectory(prefix="basilica-rank-") as temporary:
        scratch = Path(os.environ.get(env.SCRATCH, temporary)).absolute()

        async def run() -> int:
            return await Agent(command, os.environ, scratch).run()

        try:
            return asyncio.run(run())
        finally:
            rank_exec.remove_recorded()
