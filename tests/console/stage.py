"""A control plane on a real socket, in a thread of its own, with ranks that a test moves; and a browser before it."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from playwright.sync_api import Browser, BrowserContext, Page, Playwright

from basilica.core.actions import Launch
from basilica.core.mesh import SeenMesh
from basilica.core.seen import (
    AnswerState,
    Ended,
    SeenAgent,
    SeenAnswer,
    SeenBench,
    SeenProgress,
    Sight,
    Sighting,
)
from basilica.ports import Limits, Run
from tests.support.world import TalkingRuntime, World, a_request, bearer, key_of

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESK = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 740}
SECONDS = 30.0
Result = TypeVar("Result")


class Actors(TalkingRuntime):
    """Ranks with nodes and last words, and a bench probe that the test gives its result."""

    def __init__(self) -> None:
        super().__init__()
        self.node = "node-{}"
        self.bench: dict[str, SeenBench] = {}
        self.mesh: dict[str, SeenMesh] = {}
        self.gpus = 0
        self.resume: dict[str, int] = {}  # by run: the step that ranks begin with when they are started again
        self.queue = ""  # what ranks that are launched now wait for; {} is the rank

    async def launch(self, run: Run, launches: Sequence[Launch]) -> None:
        await super().launch(run, launches)
        ranks = self._runs[run.instance]
        for key, seen in ranks.items():
            if seen.node == "fake":
                ranks[key] = replace(seen, node=self.node.format(key[0] // 8), gpus=self.gpus)
                if run.instance in self.resume:
                    now, step = self._now(), self.resume[run.instance]
                    progress = SeenProgress(first_at=now, first_step=step, at=now, step=step, step_seconds=10.0)
                    ranks[key] = replace(ranks[key], progress=progress)
                if self.queue:
                    note = self.queue.format(key[0])
                    ranks[key] = replace(ranks[key], sight=Sight.QUEUED, started_at=None, note=note)

    async def observe(self, run: Run) -> Sighting:
        seen = await super().observe(run)
        return replace(seen, bench=self.bench.get(run.instance), mesh=self.mesh.get(run.instance))

    def die(self, instance: str, rank: int, ended: Ended) -> None:
        ranks = self._runs[instance]
        key = max(k for k in ranks if k[0] == rank)
        ranks[key] = replace(ranks[key], sight=Sight.ENDED, ended=ended)
        self._wake(instance)

    def told(self, instance: str, rank: int, at: float, step: int, **values: float) -> None:
        """As `report`, at some moment of the past."""
        now, self._now = self._now, lambda: at
        try:
            self.report(instance, rank, step, **values)
        finally:
            self._now = now

    def trains(self, instance: str, step: int, *ranks: int, first: int = 0, seconds: float = 0.5) -> None:
        """The newest attempts of these ranks, or of all, have reported steps from `first` up to this one."""
        now = self._now()
        for key in self._newest(instance, ranks):
            before = self._runs[instance][key].progress
            begin, number = (now, first) if before is None else (before.first_at, before.first_step)
            seen = SeenProgress(first_at=begin, first_step=number, at=now, step=step, step_seconds=seconds)
            self._runs[instance][key] = replace(self._runs[instance][key], progress=seen)
        self._wake(instance)

    def works(self, instance: str, rank: int, agent: SeenAgent) -> None:
        """The rank's program is a torchrun agent."""
        (key,) = self._newest(instance, (rank,))
        self._runs[instance][key] = replace(self._runs[instance][key], agent=agent)
        self._wake(instance)

    def answers(self, instance: str, state: AnswerState, *ranks: int, number: int = 0) -> None:
        """The programs of these ranks read notices, and have answered the one of that number."""
        for key in self._newest(instance, ranks):
            answer = SeenAnswer(state=state, number=number, at=self._now())
            self._runs[instance][key] = replace(self._runs[instance][key], answer=answer)
        self._wake(instance)

    def _newest(self, instance: str, ranks: Sequence[int]) -> list[tuple[int, int]]:
        newest = dict(sorted(self._runs[instance]))
        return [key for key in newest.items() if not ranks or key[0] in ranks]

    def measured(self, instance: str, bench: SeenBench) -> None:
        self.bench[instance] = bench
        self._wake(instance)

    def connected(self, instance: str, mesh: SeenMesh) -> None:
        self.mesh[instance] = mesh
        self._wake(instance)


class Stage:
    """Its world lives in another thread's loop: `do` runs a coroutine there, `call` a function."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready: Future[str] = Future()
        self._stop = asyncio.Event()
        self.actors: Actors
        self.world: World
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.url = self._ready.result(timeout=SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        try:
            self.actors = Actors()
            limits = Limits(deployments=10_000, ranks=100_000)
            async with World(runtime=self.actors, limits=limits) as self.world, self.world.listening() as client:
                self._ready.set_result(str(client.base_url).rstrip("/"))
                await self._stop.wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=SECONDS)

    def call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        async def work() -> Any:
            return function(*arguments, **named)

        return self.do(work())

    # ---- what people do --------------------------------------------------------------------------------------------

    def deploy(self, name: str, **options: Any) -> str:
        """A run whose ranks are up, or wait if there is a queue; its instance name."""
        return self.do(self._deploy(name, **options))

    async def _deploy(
        self,
        name: str,
        *,
        target: int = 2,
        user: str = "ann",
        restarts: int = 0,
        bench: bool = False,
        gpus: int = 0,
        **world: int,
    ) -> str:
        body = a_request(name, target=target, **({"min": 1, "max": max(8, target)} | world))
        if gpus:
            body["resources"] = {"gpus": {"count": gpus}}
        body["distributed"] |= {"maxRestarts": restarts, "bench": {"mode": "on-start" if bench else "off"}}
        who = self.world.ann if user == "ann" else self.world.bob
        answer = await who.post("/deployments", json=body)
        assert answer.status_code == 201, answer.text
        instance: str = answer.json()["instanceName"]
        waiting = self.actors.queue != ""
        await self.world.until(
            instance, lambda d: target == (sum(r.note != "" for r in d.status.ranks) if waiting else d.status.ready)
        )
        return instance

    def deploy_many(self, count: int, prefix: str = "many") -> list[str]:
        """Runs of several sizes, of which every fifth has ended."""

        async def work() -> list[str]:
            made = [await self._deploy(f"{prefix}-{n:04}", target=1 + n % 4) for n in range(count)]
            for n, instance in enumerate(made):
                if n % 5 == 0:
                    await self.world.end(instance, *([0] * (1 + n % 4)))
            return made

        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(timeout=100)

    def fail(self, instance: str, rank: int, ended: Ended) -> None:
        self.call(self.actors.die, instance, rank, ended)
        self.do(self.world.until(instance, lambda d: d.status.phase == "failed"))

    def login_link(self, user: str = "ann") -> str:
        async def ask() -> str:
            async with self.world.client(key_of(user)) as client:
                answer = await client.post("/console/login-links", headers=bearer(key_of(user)))
            path: str = answer.json()["path"]
            return path

        return self.url + self.do(ask())


def launch(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


@contextmanager
def looking(browser: Browser, link: str, **options: Any) -> Iterator[Page]:
    """A page behind a login link, in a context of its own. What the browser complains of fails the test."""
    context: BrowserContext = browser.new_context(**({"viewport": DESK} | options))
    context.set_default_timeout(15_000)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if "Security Policy" in said.text else None)
    try:
        page.goto(link)
        yield page
        assert complaints == []
    finally:
        context.close()
