"""The process that supervises one local gang: `python -m basilica.executors.local.warden`, its task as JSON on stdin.

The local runtime's fork server starts the replicas, each under a supervisor that records its end. The warden stops them
at their timeout, and when the process that owns them is gone. Their state is in files (see `gang.py`), so any process
can read it; the warden notifies readers of changes by writing to one of the files. It exits after the last replica. If
it is killed itself, replicas continue under their supervisors; if the owner is killed, too, the next launch on the same
state directory, by any process, stops them.
"""

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from basilica.core import environment as env
from basilica.core.ends import START_ERROR
from basilica.core.errors import BasilicaError, RuntimeUnavailable
from basilica.executors.local.gang import CHANGES, OVER, TIME_IS_UP, WARDEN, Gang, Task, process_namespace
from basilica.machine import files
from basilica.machine.clocks import SteadyClock
from basilica.machine.descriptors import raise_descriptor_limit
from basilica.machine.files import UnusableFile
from basilica.machine.layout import Key, Layout
from basilica.machine.places import start_of
from basilica.machine.pools import Pool
from basilica.machine.proc import boot
from basilica.machine.processes import Watch
from basilica.reports.wakeups import Wakeups
from basilica.runtimes.local.forkserver import ForkServer
from basilica.runtimes.local.gpus import ask_nvidia_smi
from basilica.runtimes.local.orphans import bury_orphan
from basilica.runtimes.local.records import NOBODY, Exit, Record, append_exit, bury, read_record
from basilica.runtimes.local.task import RankTask, StartRequest

LOG_BYTES_MAX = 64 << 20
THREADS = 2


class Warden:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.layout = Layout(Path(task["directory"]))
        self.directory = self.layout.root
        self.clock = SteadyClock()
        self.pool = Pool("warden", THREADS)
        self.gang = Gang(self.directory, task["job"])

    async def tend(self) -> None:
        """Supervise the gang from the start of the first replica to the end of the last."""
        descriptors = raise_descriptor_limit()
        self.layout.checkpoints(self.task["job"]).mkdir(mode=0o700, parents=True)
        self.layout.results(self.task["job"]).mkdir(mode=0o700)
        self._publish_facts()
        wakeups = Wakeups(self.layout.wake, lambda _: self._notify(), self._notify)
        supervisors = await self._launch(descriptors)
        owner = self._watch_owner()
        deadline = asyncio.get_running_loop().call_later(self.task["timeout"], self._time_is_up)
        _answer({"launched": True})
        await asyncio.gather(*(self._record_end(rank, pid) for rank, pid in enumerate(supervisors)))
        with suppress(OSError):  # a full disk: the records show later readers that all have ended
            files.write(str(self.directory / OVER), b"")
        deadline.cancel()
        wakeups.close()
        if owner is not None:
            owner.close()

    def _publish_facts(self) -> None:
        """Write the file by which other processes find the warden and its owner."""
        me = {
            "pid": os.getpid(),
            "start": start_of(os.getpid()),
            "boot": boot(),
            "processes": process_namespace(),
            "timeout": self.task["timeout"],
            "owner": self.task["owner"],
            "replicas": self.task["replicas"],
        }
        files.write(str(self.directory / CHANGES), b"")
        files.write(str(self.directory / WARDEN), json.dumps(me).encode())

    # ---- starting ------------------------------------------------------------------------------------------------

    async def _launch(self, descriptors: int) -> list[int]:
        """Start the replicas; return the pids of their supervisors, by rank. The fork server ends after that."""
        visible = await self._visible_gpus()
        server = ForkServer(python=sys.executable, complaints=self.layout.complaints, descriptors=descriptors)
        try:
            reply = await server.start_ranks(self._request(visible))
        finally:
            await server.close()
        if reply["error"] is not None:
            self._stop_all(0.0)
            raise RuntimeUnavailable(reply["error"])
        return reply["pids"]

    async def _visible_gpus(self) -> list[str]:
        """Return the indexes of the GPUs to assign in turn: a gang larger than their number shares them."""
        return [str(gpu.index) for gpu in (await ask_nvidia_smi()).gpus] if self.task["gpus"] else []

    def _request(self, gpus: list[str]) -> StartRequest:
        task = self.task
        return StartRequest(
            argv=task["argv"],
            env={
                **task["env"],
                env.CHECKPOINT_DIR: str(self.layout.checkpoints(task["job"])),
                env.TORCH_WORLD_SIZE: str(task["replicas"]),
                env.TORCH_LOCAL_RANK: "0",
                "PYTHONUNBUFFERED": "1",
            },
            cwd=task["workdir"],
            grace=task["grace"],
            memory_limit=None,
            log_limit=LOG_BYTES_MAX,
            wake=str(self.layout.wake),
            clock_zero=self.clock.zero,
            ranks=[self._rank(rank, gpus) for rank in range(task["replicas"])],
        )

    def _rank(self, rank: int, gpus: list[str]) -> RankTask:
        job = self.task["job"]
        result, error = self.layout.result(job, rank), self.layout.error(Key(job, rank, 0))
        variables = dict.fromkeys(self.task["rank_names"], str(rank)) | env.attempt_environment(
            rank, 0, self.task["replicas"], result_file=result, error_file=error
        )
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = gpus[rank % len(gpus)]
        return RankTask(
            instance=job,
            rank=rank,
            attempt=0,
            directory=str(self.layout.rank(job, rank)),
            argv=None,
            env=variables,
            gpus=[],
            cgroups=[],
            memory_events=None,
            kill_file=None,
            freezer=None,
        )

    # ---- ending --------------------------------------------------------------------------------------------------

    async def _record_end(self, rank: int, supervisor: int) -> None:
        """Return once the replica's record has its end: written by the supervisor, or by us if that was killed."""
        await _gone(supervisor, None)
        key = Key(self.task["job"], rank, 0)
        path = self.layout.record(key)
        try:
            record = await self.pool.run(read_record, path)
        except UnusableFile:  # the file was replaced, and its supervisor is not alive to rewrite it
            record = Record(claim=NOBODY)
        if record is None:
            problem = f"its supervisor could not begin; see {self.layout.complaints}"
            bury(path, Exit(exit_code=None, reason=START_ERROR, finished_at=self.clock.now(), start_error=problem))
        elif record.exit is None:
            if record.running is not None:
                await _gone(record.running.pid, record.running.start)
            exit = await bury_orphan(self.layout, key, record.claim, self.pool, self.clock)
            await self.pool.run(append_exit, path, exit, record)
        self._notify()

    def _watch_owner(self) -> Watch | None:
        if self.task["owner"] is None:
            return None
        try:
            return Watch(*self.task["owner"], self._owner_is_gone)
        except ProcessLookupError:
            self._owner_is_gone()
            return None

    def _owner_is_gone(self) -> None:
        self.task["owner"] = None
        self._stop_all(self.task["grace"])

    def _time_is_up(self) -> None:
        with suppress(OSError):  # a full disk: they are stopped all the same, without the reason
            files.write(str(self.directory / TIME_IS_UP), b"")
        self._stop_all(self.task["grace"])

    def _stop_all(self, grace: float) -> None:
        for rank in range(self.task["replicas"]):
            self.gang.cancel(rank, grace)

    def _notify(self) -> None:
        """Notify the readers of the gang's state: they watch this file."""
        with (
            suppress(OSError),
            files.appending(str(self.directory / CHANGES)) as file,
        ):  # full disk: our exit is noticed
            os.write(file, b".")


async def _gone(pid: int, start: int | None) -> None:
    gone = asyncio.Event()
    try:
        watch = Watch(pid, start, gone.set)
    except ProcessLookupError:
        return
    await gone.wait()
    watch.close()


def _answer(message: dict[str, object]) -> None:
    """Answer the process that started us, once; it reads no further line."""
    with suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def main() -> int:
    task: Task = json.loads(sys.stdin.readline())
    if os.fork():
        os._exit(0)  # the process that started us need not reap the warden
    try:
        asyncio.run(_tend(task))
    except BasilicaError as error:
        _answer({"error": str(error)})
        return 1
    return 0


async def _tend(task: Task) -> None:
    await Warden(task).tend()


if __name__ == "__main__":
    sys.exit(main())
