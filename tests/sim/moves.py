"""The moves of the game: everything that may happen to a simulated run, by name, with small integers for choices."""

from collections.abc import Callable

from basilica.core.phase import BenchPhase
from basilica.core.seen import AnswerState
from basilica.core.spec import BenchOnStart, DeploymentSpec, Exec, Wanted
from basilica.core.world import WorldSize

from .simulation import NODES, Simulation

# (exit code, signal, reason, by_platform)
ENDINGS: tuple[tuple[int | None, str | None, str, bool], ...] = (
    (0, None, "Completed", False),
    (0, None, "Completed", False),
    (1, None, "Error", False),
    (3, None, "Error", False),
    (137, "SIGKILL", "OOMKilled", False),
    (137, "SIGKILL", "SIGKILL", False),
    (None, None, "Unknown", False),
    (None, None, "Evicted", True),
)
STEPS = (0.0, 0.01, 0.5, 1.0, 5.0, 29.0, 31.0, 61.0, 1600.0, -3.0)


def make_spec(  # noqa: PLR0917
    low: int, extra: int, room: int, restarts: int, resize: int, bench: int, ttl: int, deadline: int, start: int
) -> DeploymentSpec:
    """A spec from small integers; each of the last three is 0 for none."""
    return DeploymentSpec(
        name="sim",
        program=Exec(("train",)),
        world=WorldSize(low, low + extra, low + extra + room),
        max_restarts=restarts,
        resize="restart" if resize else "join",
        on_stall="restart" if (low + restarts) % 2 else "show",
        bench=(None, BenchOnStart(), BenchOnStart("strict"))[bench],
        ttl_seconds=(None, 0.0, 100.0)[ttl],
        deadline_seconds=(None, 50.0)[deadline],
        start_deadline_seconds=(None, 20.0)[start],
    )


def turn(sim: Simulation, n: int) -> None:
    sim.turn()


def turn_on_an_old_look(sim: Simulation, n: int) -> None:
    sim.turn(stale=1 + n % 5)


def turn_and_die(sim: Simulation, n: int) -> None:
    sim.turn(dies_after=n % 6)


def turn_and_lose_the_race(sim: Simulation, n: int) -> None:
    sim.turn(conflict=True)


def rank_starts(sim: Simulation, n: int) -> None:
    process = sim.nth(n, [p for p in sim.processes if not p.running])
    if process:
        sim.start(process)


def all_ranks_start(sim: Simulation, n: int) -> None:
    for process in sim.processes:
        sim.start(process)


def rank_queues(sim: Simulation, n: int) -> None:
    process = sim.nth(n, [p for p in sim.processes if not p.running])
    if process:
        sim.queue(process)


def rank_exits(sim: Simulation, n: int) -> None:
    process = sim.nth(n // len(ENDINGS), [p for p in sim.processes if p.running])
    if process:
        code, signal, reason, platform = ENDINGS[n % len(ENDINGS)]
        sim.exit(process, code, signal, reason, platform=platform)


def rank_stalls_or_resumes(sim: Simulation, n: int) -> None:
    process = sim.nth(n, [p for p in sim.processes if p.running])
    if process:
        sim.stall_or_resume(process)


def agent_meets(sim: Simulation, n: int) -> None:
    process = sim.nth(n, [p for p in sim.processes if p.running])
    if process:
        sim.meet(process)


def workers_start(sim: Simulation, n: int) -> None:
    for process in sim.processes:
        sim.begin_round(process)


def worker_exits(sim: Simulation, n: int) -> None:
    process = sim.nth(n // 3, [p for p in sim.processes if p.agent is not None])
    if process:
        sim.worker_exits(process, (0, 1, 137)[n % 3], echo=n % 2 == 0)


def rank_takes_steps(sim: Simulation, n: int) -> None:
    process = sim.nth(n // 20, [p for p in sim.processes if p.running])
    if process:
        sim.take_steps(process, n % 20, back=n % 7)


def rank_restores(sim: Simulation, n: int) -> None:
    process = sim.nth(n // 3, [p for p in sim.processes if p.running])
    if process:
        sim.restore(process, refuses=n % 3 == 0)


def snapshots_block(sim: Simulation, n: int) -> None:
    process = sim.nth(n // 5, [p for p in sim.processes if p.progress is not None])
    if process:
        sim.snapshot(process, (0.0, 0.001, 0.3, 2.0, 1e6)[n % 5])


def rank_reads_notices(sim: Simulation, n: int) -> None:
    process = sim.nth(n, [p for p in sim.processes if p.running])
    if process:
        sim.answer(process, AnswerState.LISTENING)


def listeners_answer(sim: Simulation, n: int) -> None:
    for process in sim.processes:
        if process.answer is not None and n % 7 != process.rank:
            sim.answer(
                process,
                (AnswerState.READY, AnswerState.READY, AnswerState.SEEN, AnswerState.LATE, AnswerState.GIVEN)[n % 5],
            )


def platform_takes_a_rank(sim: Simulation, n: int) -> None:
    process = sim.nth(n, [p for p in sim.processes if p.running])
    if process:
        sim.take_away(process, float(n % 40))


def stopped_ranks_obey(sim: Simulation, n: int) -> None:
    for process in sim.processes:
        if process.asked_to_stop:
            sim.exit(process, (0, 143, 137)[n % 3], "SIGTERM", "SIGTERM", platform=False)


def rank_cannot_start(sim: Simulation, n: int) -> None:
    process = sim.nth(n, [p for p in sim.processes if not p.running])
    if process:
        sim.fail_to_start(process)


def rank_vanishes(sim: Simulation, n: int) -> None:
    process = sim.nth(n)
    if process:
        sim.vanish(process)


def record_vanishes(sim: Simulation, n: int) -> None:
    ended = [p for p in sim.processes if not p.alive and p.key not in sim.told]
    if ended:
        sim.vanish(ended[n % len(ended)])


def rank_is_overlooked(sim: Simulation, n: int) -> None:
    process = sim.nth(n)
    if process:
        sim.hide(process)


def rank_is_blurred(sim: Simulation, n: int) -> None:
    process = sim.nth(n)
    if process:
        sim.blur(process)


def looks_are_whole(sim: Simulation, n: int) -> None:
    sim.reveal()


def new_ranks_show_late(sim: Simulation, n: int) -> None:
    sim.hides_new = True


def ranks_start_at_once(sim: Simulation, n: int) -> None:
    sim.starts_at_once = not sim.starts_at_once


def time_passes(sim: Simulation, n: int) -> None:
    sim.pass_time(STEPS[n % len(STEPS)])


def timer_rings(sim: Simulation, n: int) -> None:
    if sim.wake_at is not None:
        sim.pass_time(max(0.0, sim.wake_at - sim.now))
        sim.turn()


def somebody_scales(sim: Simulation, n: int) -> None:
    sim.scale(1 + n % 6)


def somebody_restarts(sim: Simulation, n: int) -> None:
    sim.restart()


def somebody_cancels(sim: Simulation, n: int) -> None:
    sim.ask(Wanted.CANCEL)


def somebody_deletes(sim: Simulation, n: int) -> None:
    sim.ask(Wanted.DELETE)


def probe_moves(sim: Simulation, n: int) -> None:
    phases = (BenchPhase.RUNNING, BenchPhase.SUCCEEDED, BenchPhase.FAILED, BenchPhase.SKIPPED)
    sim.bench(phases[n % len(phases)])


def link_breaks_or_heals(sim: Simulation, n: int) -> None:
    ways = [(a, b) for a in NODES for b in NODES if a != b]
    sim.cut_or_heal(*ways[n % len(ways)])


def rendezvous_is_lost(sim: Simulation, n: int) -> None:
    sim.lose_rendezvous()


Move = Callable[[Simulation, int], None]

# How often the explorer makes each; Hypothesis knows better than any number what is worth trying.
WEIGHTS: dict[Move, int] = {
    turn: 30,
    turn_on_an_old_look: 4,
    turn_and_die: 6,
    turn_and_lose_the_race: 2,
    rank_starts: 10,
    all_ranks_start: 8,
    rank_queues: 2,
    rank_exits: 8,
    rank_stalls_or_resumes: 5,
    agent_meets: 6,
    workers_start: 6,
    worker_exits: 5,
    rank_takes_steps: 10,
    rank_restores: 5,
    snapshots_block: 8,
    rank_reads_notices: 5,
    listeners_answer: 6,
    platform_takes_a_rank: 1,
    stopped_ranks_obey: 6,
    rank_cannot_start: 1,
    rank_vanishes: 2,
    record_vanishes: 1,
    rank_is_overlooked: 4,
    rank_is_blurred: 2,
    looks_are_whole: 6,
    new_ranks_show_late: 2,
    ranks_start_at_once: 2,
    time_passes: 12,
    timer_rings: 6,
    somebody_scales: 5,
    somebody_restarts: 2,
    somebody_cancels: 1,
    somebody_deletes: 1,
    probe_moves: 2,
    link_breaks_or_heals: 3,
    rendezvous_is_lost: 1,
}
