"""schemathesis reads our OpenAPI document, asks whatever it allows and forbids, and holds the answers against it."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx2
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.exploring import examples
from tests.support.world import World, a_request, bearer, key_of
from tests.test_public_names import ROUTES

EXAMPLES = examples(20)
EXAMPLES_OF_A_NAME = 6  # where nothing else varies
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
TAKE_NOTHING = ("/health", "/metrics", "/public/deployments/{name}/metadata")
STREAMS = ("/deployments/{name}/watch", "/deployments/{name}/logs")
ENDLESS = ("/watch",)  # told about in tests/server/test_console.py


class Background:
    """A world that listens, in a loop of its own thread: schemathesis asks without one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._url: Future[str] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.url = self._url.result(timeout=30)
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.headers.update(bearer(key_of("ann")))

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with World() as world, world.listening() as client:
            self._url.set_result(str(client.base_url))
            await self._stop.wait()

    def close(self) -> None:
        self.session.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def ensure_runs(self) -> None:
        """A live run called `live` and an ended one called `done`, whatever was done to them before."""
        for name in ("live", "done"):
            self.session.post(f"{self.url}/deployments", json=a_request(name))
        self.session.post(f"{self.url}/deployments/done/cancel")
        while not self.session.get(f"{self.url}/deployments/done").json()["distributed"]["settled"]:
            pass


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    server = Background()
    yield server
    server.close()


@pytest.fixture(scope="module")
def document(background: Background) -> Any:
    return httpx2.get(f"{background.url}/openapi.json", trust_env=False).json()


def questions() -> Iterator[tuple[str, str, GenerationMode]]:
    """Every operation with data as it should be and, where it takes any, as it should not be."""
    for route in ROUTES:
        method, path = route.split(" ", 1)
        if path in ENDLESS:
            continue
        yield method, path, GenerationMode.POSITIVE
        if path not in TAKE_NOTHING:
            yield method, path, GenerationMode.NEGATIVE


@pytest.mark.hunt
@pytest.mark.parametrize(("method", "path", "mode"), list(questions()), ids=str)
def test_every_answer_is_as_the_document_says(
    background: Background, document: Any, method: str, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(document)
    operation = schema[path][method.lower()]
    definition = document["paths"][path][method.lower()]
    names = st.sampled_from(["done", None] if path in STREAMS else ["live", "done", None])

    only_a_name = (
        not any(p["in"] != "path" for p in definition.get("parameters", ())) and "requestBody" not in definition
    )
    background.ensure_runs()

    @settings(
        max_examples=EXAMPLES_OF_A_NAME if only_a_name else EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), name=names)
    def ask(case: schemathesis.Case[Any], name: str | None) -> None:
        if "{name}" in path and name is not None:
            if method != "GET":
                background.ensure_runs()
            case.path_parameters = {"name": name}
        if isinstance(case.query, dict) and isinstance(case.query.get("wait"), int | float):
            case.query["wait"] = min(case.query["wait"], 0.01)
        case.call_and_validate(
            base_url=background.url, session=background.session, headers=bearer(key_of("ann")), checks=CHECKS
        )

    ask()
