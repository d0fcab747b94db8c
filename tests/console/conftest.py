"""A browser for all tests of the console, and a stage for each module."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.console.stage import Stage, launch, looking

expect.set_options(timeout=20_000)  # of a busy machine; what is there is seen at once


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = launch(playwright)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    it = Stage()
    yield it
    it.close()


@pytest.fixture
def page(browser: Browser, stage: Stage) -> Iterator[Page]:
    """Ann's, logged in, with the overview open."""
    with looking(browser, stage.login_link()) as it:
        yield it
