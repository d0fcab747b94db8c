"""Pictures of every page, in light, dark and on a phone: `python -m tests.console.pictures DIRECTORY`."""

import sys
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from tests.console import scenes
from tests.console.stage import DESK, PHONE, Stage, launch, looking

MOMENTARY = ("planned", "loop")  # over before the other looks have their turn


def at(stage: Stage, ago: float) -> None:
    """What happens next happens so many seconds ago: the pictures show runs of some age."""
    for it, name in ((stage.world.clock, "now"), (stage.actors, "_now"), (stage.world.memory, "_now")):
        setattr(it, name, lambda: time.time() - ago)


def fill(stage: Stage) -> dict[str, str]:
    stage.actors.gpus = 8
    for n in range(24):
        at(stage, 200_000 - n * 7000)
        instance = stage.deploy(f"{('sweep', 'probe', 'eval', 'ablation')[n % 4]}-{n:02}", target=1 + n % 5)
        at(stage, 196_000 - n * 7000)
        if n % 3 != 2:
            stage.do(stage.world.end(instance, *([0] * (1 + n % 5))))
        elif n % 2:
            stage.do(stage.world.plane.cancel("ann", instance))
            stage.do(stage.world.settled(instance))
    at(stage, 12_000)
    weak = stage.deploy("rlhf-70b", target=6, min=6, max=12, restarts=9)
    at(stage, 300)
    stage.call(stage.actors.exit, weak, 4, 137, "OOMKilled")
    stage.do(stage.world.until(weak, lambda d: d.status.phase == "degraded"))
    at(stage, 9000)
    big = stage.deploy("gpt-1024", target=1024, min=512, max=1024)
    at(stage, 5400)
    failed = scenes.failed(stage)
    at(stage, 2500)
    stalled = scenes.stalled(stage)
    made = {
        "failed": failed,
        "stalled": stalled,
        "big": big,
        "worker": scenes.failed_worker(stage),
        "rounds": scenes.rounds(stage),
        "replicas": scenes.rounds(stage, "diloco-64", replicas=64, count=500),
        "training": scenes.training(stage, clock=lambda s: at(stage, s)),
    }
    at(stage, 0)
    made["loop"] = scenes.torchrun(stage, crashes=5)
    made["planned"] = scenes.planned(stage)
    for rank in range(16):
        lines = [f"step {n * 10} loss {2.8 - n * 0.03:.4f} tokens/s 41{n:03}" for n in range(60)]
        stage.do(stage.actors.write(made["training"], rank, *lines))
    stage.do(stage.actors.write(made["training"], 3, "RuntimeError: a worker was slow", "\x1b[32mrecovered\x1b[0m"))
    return made


def take(page: Page, path: Path, ready: str) -> None:
    page.locator(ready).first.wait_for()
    page.wait_for_timeout(700)  # what is still being asked for: curves, events
    page.screenshot(path=str(path))


def take_rounds(page: Page, path: Path) -> None:
    """That part alone: it is below what a screen shows."""
    part = page.get_by_role("region", name="Rounds", exact=True)
    page.locator(".round-row").nth(50).wait_for()
    page.locator("[role=rowheader]", has_text="109").scroll_into_view_if_needed()
    page.locator(".replica[aria-label*='109, replica 5']").hover()
    part.screenshot(path=str(path))


def pages(made: dict[str, str]) -> dict[str, tuple[str, str]]:
    run = f"#/run/{made['training']}"
    return {
        "planned": (f"#/run/{made['planned']}", ".notice"),
        "loop": (f"#/run/{made['loop']}", ".incident-card"),
        "overview": ("#/", ".rows .run-row"),
        "run": (run, ".curve"),
        "worker": (f"#/run/{made['worker']}", ".card.bad"),
        "failed": (f"#/run/{made['failed']}", ".card.bad"),
        "stalled": (f"#/run/{made['stalled']}", ".card.warn"),
        "big": (f"#/run/{made['big']}", ".grid [role=option]"),
        "rounds": (f"#/run/{made['rounds']}", ".replica"),
        "replicas": (f"#/run/{made['replicas']}", ".replica"),
        "logs": (f"{run}/logs", ".line"),
    }


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    stage = Stage()
    try:
        made = fill(stage)
        with sync_playwright() as playwright:
            browser: Browser = launch(playwright)
            for look, options in {
                "light": {"viewport": DESK, "color_scheme": "light"},
                "dark": {"viewport": DESK, "color_scheme": "dark"},
                "phone": {"viewport": PHONE, "color_scheme": "light"},
            }.items():
                with looking(browser, stage.login_link(), **options) as page:
                    for name, (where, ready) in pages(made).items():
                        if name in MOMENTARY and look != "light":
                            continue
                        page.goto(f"{stage.url}/{where}")
                        take(page, directory / f"{name}-{look}.png", ready)
                        if name == "rounds":
                            take_rounds(page, directory / f"rounds-part-{look}.png")
            with looking(browser, f"{stage.url}/") as page:
                take(page, directory / "signed-out-light.png", ".signed-out")
            browser.close()
    finally:
        stage.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
