"""The bench probe as the published client sees it: a result while the run goes on, or the reason why there is none."""

from typing import Any

from tests.e2e.official.published import OLDER, User, heard_warnings, outcome, plain, story, until

ON: Any = "on-start" if OLDER else True
OFF: Any = "off" if OLDER else False


def bench_of(user: User, training: Any) -> Any:
    """The bench block; 0.29.0 drops most of it, so there as curl sees it."""
    if OLDER:
        return user.curl("GET", f"/deployments/{training.name}")["distributed"].get("bench")
    return user.client.get(training.name).distributed.get("bench")


def facts(diagnostics: dict[str, Any]) -> dict[str, Any]:
    """Without the result, which is told by itself."""
    return {name: str(value) for name, value in diagnostics.items() if name != "result"}


@story
def a_bench_that_is_asked_for_measures_while_the_run_goes_on(user: User) -> Any:
    gate = user.gate("go")
    training = user.shell("bench-on", gate.wait, bench=ON)
    block = until(lambda: bench_of(user, training), lambda seen: bool(seen) and seen["phase"] == "Succeeded")
    training.refresh()
    phase = user.phase(training)
    gate.open()
    user.until_phase(training, "succeeded")
    return {
        "while_running": phase,
        "block": block,
        "result": {"p50": training.bench.busbw_gbps_p50, "sizes": list(training.bench.size_bytes_swept)},
        "diagnostics": None if OLDER else facts(plain(training.bench_diagnostics)),
        "events": [(e["type"], e["reason"], e["message"]) for e in training.events() if "Bench" in e["reason"]],
        "ready": training.world.ready,
    }


@story
def a_bench_that_is_off_is_not_there(user: User) -> Any:
    training = user.deploy("bench-off", ["true"], bench=OFF)
    diagnostics = None if OLDER else training.bench_diagnostics
    return {"block": bench_of(user, training), "result": training.bench, "diagnostics": diagnostics}


@story
def waiting_for_the_bench_ends(user: User) -> Any:
    gate = user.gate("go")

    def wait(name: str, mode: str, *, bench: bool) -> dict[str, Any]:
        settings = {"bench": bench, "wait_for_bench": mode, "bench_timeout": 60}
        with heard_warnings() as heard:
            deployed = outcome(lambda: user.shell(name, gate.wait, **settings).phase)
        return {"deployed": deployed, "heard": heard}

    seen = {
        "best_effort": wait("best-effort", "best_effort", bench=True),
        "required": wait("required", "required", bench=True),
        "off": wait("required-off", "required", bench=False),
    }
    gate.open()
    return seen


@story
def a_strict_bench_measures_too(user: User) -> Any:
    gate = user.gate("go")
    settings = user.settings("strict", bench=True, bench_placement="strict")
    training = user.client._deploy_distributed_impl(command=["sh", "-c", gate.wait], **settings)
    block = until(lambda: bench_of(user, training), lambda seen: bool(seen) and seen["phase"] == "Succeeded")
    gate.open()
    return block["mode"]


@story
def a_run_that_ends_first_has_its_bench_skipped(user: User) -> Any:
    training = user.shell("bench-late", "true", bench=ON)
    user.until_phase(training, "succeeded")
    block = until(lambda: bench_of(user, training), lambda seen: bool(seen) and seen["phase"] != "Pending")
    return block["phase"]
