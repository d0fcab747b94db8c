"""What can be done to a run from its page, and the command that does the same."""

from playwright.sync_api import BrowserContext, Page, expect

from basilica.core.errors import DeploymentNotFound
from tests.console.stage import Stage


def visit(page: Page, stage: Stage, name: str) -> None:
    page.goto(f"{stage.url}/#/run/{name}")
    expect(page.locator(".run-head .phase")).to_contain_text("ready")


def clipboard(context: BrowserContext, page: Page) -> str:
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def test_scaling(page: Page, stage: Stage) -> None:
    instance = stage.deploy("scaled", target=2, max=6)
    visit(page, stage, instance)
    page.get_by_label("Ranks", exact=True).and_(page.locator("input")).fill("5")
    page.get_by_role("button", name="Scale", exact=True).click()
    stage.do(stage.world.until(instance, lambda d: d.status.ready == 5))
    expect(page.locator(".grid [role=option]")).to_have_count(5)
    expect(page.locator(".facts .world")).to_have_attribute("aria-label", "5 of 5 ranks up, between 1 and 6")


def test_what_the_server_refuses_is_told_in_its_words(page: Page, stage: Stage) -> None:
    instance = stage.deploy("bounded", target=2, max=4)
    visit(page, stage, instance)
    field = page.locator("#target")
    field.evaluate("it => it.removeAttribute('max')")
    field.evaluate("it => it.form.noValidate = true")
    field.fill("9")
    page.get_by_role("button", name="Scale", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("world size 9 is not within 1..4")


def test_cancel_asks_first(page: Page, stage: Stage) -> None:
    instance = stage.deploy("stopped")
    visit(page, stage, instance)
    page.get_by_role("button", name="Cancel…").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"basilica train cancel {instance}")
    expect(page.get_by_role("button", name="Keep it")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert stage.do(stage.world.plane.get("ann", instance)).spec.wanted == "run"
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.locator(".run-head .phase")).to_contain_text("cancelled")
    expect(page.get_by_role("button", name="Cancel…")).to_be_hidden()


def test_delete_asks_first_and_goes_back_to_the_list(page: Page, stage: Stage) -> None:
    instance = stage.deploy("removed")
    visit(page, stage, instance)
    page.get_by_role("button", name="Delete…").click()
    expect(page.get_by_role("dialog")).to_contain_text("cannot be undone")
    page.keyboard.press("Escape")
    assert stage.do(stage.world.plane.get("ann", instance)).spec.wanted == "run"
    page.get_by_role("button", name="Delete…").click()
    page.get_by_role("button", name="Delete the run").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
    try:
        stage.do(stage.world.plane.get("ann", instance))
    except DeploymentNotFound:
        return
    raise AssertionError("it is still there")


def test_a_run_that_somebody_else_deletes_says_so(page: Page, stage: Stage) -> None:
    instance = stage.deploy("gone")
    visit(page, stage, instance)
    stage.do(stage.world.plane.delete("ann", instance))
    expect(page.locator(".run-head .why")).to_have_text("This run has been deleted.")


def test_the_command_is_copied(page: Page, stage: Stage) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    instance = stage.deploy("copied", target=2)
    visit(page, stage, instance)
    page.locator("#target").fill("3")
    page.get_by_role("button", name="Copy the command that scales").click()
    expect(page.get_by_role("button", name="Copy the command that scales")).to_have_text("Copied")
    assert clipboard(page.context, page) == f"basilica train scale {instance} --target 3"
    page.get_by_role("button", name="Delete…").click()
    page.get_by_role("dialog").get_by_role("button", name="Copy").click()
    expect(page.get_by_role("dialog").get_by_role("button", name="Copied")).to_be_visible()
    assert clipboard(page.context, page) == f"basilica train down {instance}"


def test_the_keyboard_keeps_its_place_through_what_is_done(page: Page, stage: Stage) -> None:
    instance = stage.deploy("by-keyboard", target=2, max=6)
    visit(page, stage, instance)
    page.locator("#target").fill("4")
    page.keyboard.press("Tab")
    scale = page.get_by_role("button", name="Scale", exact=True)
    expect(scale).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".grid [role=option]")).to_have_count(4)
    expect(scale).to_be_focused()
    page.get_by_role("button", name="Cancel…").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".run-head .phase")).to_contain_text("cancelled")
    expect(page.get_by_role("button", name="Delete…")).to_be_focused()
