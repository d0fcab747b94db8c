"""What stories are told with: the published client, and somebody who uses it.

Runs in the published client's own environment, where `basilica` is that client and not this project.
"""

import dataclasses
import importlib
import importlib.metadata
import json
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

basilica: Any = importlib.import_module("basilica")
VERSION = importlib.metadata.version("basilica-sdk")
OLDER = VERSION == "0.29.0"  # no phase, rank exits or wait_until_complete; `deploy_distributed` is public

PATIENCE = 30.0
DEPLOY_TIMEOUT = 19  # from 10 to 19 the client looks once a second

Seen = TypeVar("Seen")
Story = Callable[["User"], Any]
STORIES: dict[str, Story] = {}
IN_A_HURRY: set[str] = set()


def story(function: Story) -> Story:
    """Register what one test sees; the test has the same name with `test_` before it."""
    assert function.__name__ not in STORIES
    STORIES[function.__name__] = function
    return function


def in_a_hurry(function: Story) -> Story:
    """Mark a story in which the client or the server waits a second or two at most: others beside it would be felt."""
    IN_A_HURRY.add(function.__name__)
    return function


@dataclasses.dataclass(frozen=True)
class Gate:
    """A file that ranks wait for, so that a run goes on exactly when its story says so."""

    path: Path

    def open(self) -> None:
        self.path.touch()

    @property
    def wait(self) -> str:
        """Shell commands that end when the gate is open."""
        return f"until [ -e '{self.path}' ]; do sleep 0.1; done"


@dataclasses.dataclass(frozen=True)
class User:
    """Somebody with the published client, a key and a directory for what ranks and stories tell each other."""

    url: str
    key: str
    directory: Path
    torchrun_path: str
    others: dict[str, str]

    @property
    def client(self) -> Any:
        return basilica.BasilicaClient(base_url=self.url, api_key=self.key)

    def with_key(self, key: str) -> "User":
        return dataclasses.replace(self, key=key)

    def gate(self, name: str) -> Gate:
        return Gate(self.directory / name)

    def deploy(self, name: str, command: list[str], **settings: Any) -> Any:
        """Deploy by command with the version's public call, and wait as it does until enough ranks are up."""
        settings = self.settings(name, **settings)
        if OLDER:
            return self.client.deploy_distributed(command=command, **settings)
        return basilica.distributed(command=command, client=self.client, **settings)

    async def deploy_async(self, name: str, command: list[str], **settings: Any) -> Any:
        client = self.client
        deploy = client.deploy_distributed_async if OLDER else client._deploy_distributed_impl_async
        return await deploy(command=command, **self.settings(name, **settings))

    def settings(self, name: str, *, size: tuple[int, int, int] = (1, 2, 3), **settings: Any) -> dict[str, Any]:
        defaults = {"gpu_count": 0, "timeout": DEPLOY_TIMEOUT}
        return {"name": name, "world_size": basilica.WorldSize(*size), **defaults, **settings}

    def shell(self, name: str, script: str, **settings: Any) -> Any:
        return self.deploy(name, ["sh", "-c", script], **settings)

    def phase(self, training: Any) -> str:
        return str(self.client.get(training.name).phase)

    def until_phase(self, training: Any, phase: str) -> None:
        until(lambda: self.phase(training), lambda seen: seen == phase)
        training.refresh()

    def until_settled(self, training: Any) -> None:
        """Until every exit is in; the published client cannot see that."""
        until(lambda: self.curl("GET", f"/deployments/{training.name}"), lambda d: d["distributed"]["settled"])
        training.refresh()

    def exits(self, training: Any) -> list[dict[str, Any]]:
        """Rank exits as the version's client gives them; 0.29.0 knows none, so there as curl sees them."""
        if not OLDER:
            return [dataclasses.asdict(e) for e in training.rank_exits]
        answer = self.curl("GET", f"/deployments/{training.name}")
        names = {
            "rank": "rank",
            "exit_code": "exitCode",
            "termination_reason": "terminationReason",
            "restart_count": "restartCount",
        }
        return [{ours: e[wire] for ours, wire in names.items()} for e in answer["distributed"]["rankExits"]]

    def curl(self, method: str, path: str, body: object = None) -> Any:
        """The same server without any client library."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}"}
        call = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(call, timeout=PATIENCE) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return json.load(error)


def until(look: Callable[[], Seen], good: Callable[[Seen], bool], seconds: float = PATIENCE) -> Seen:
    """Look until it is good; what was seen last otherwise."""
    deadline = time.monotonic() + seconds
    while not good(seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds:g} s still {plain(seen)}")
        time.sleep(0.05)
    return seen


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call did: `returned`, or `raised` with the exception's kind, text and facts."""
    try:
        return {"returned": plain(call())}
    except Exception as error:  # noqa: BLE001 (whatever it raises is what the story is about)
        return raised(error)


def raised(error: BaseException) -> dict[str, Any]:
    return {
        "raised": type(error).__name__,
        "text": str(error),
        "facts": plain({k: v for k, v in vars(error).items() if not k.startswith("_")}),
    }


def after_first_look(training: Any, action: Callable[[], object]) -> None:
    """Do something once the client has looked at the run: what follows happens while it waits, and not before."""
    look = training.refresh

    def refresh() -> None:
        training.refresh = look
        look()
        action()

    training.refresh = refresh


def plain(value: Any) -> Any:
    """Anything as JSON can hold it."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case datetime():
            return value.isoformat()
        case dict():
            return {str(k): plain(v) for k, v in value.items()}
        case list() | tuple():
            return [plain(v) for v in value]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        case _:
            return repr(value)


_heard: dict[int, list[str]] = {}


def listen_to_warnings() -> None:
    """Keep warnings by thread: each story runs in a thread of its own."""

    def keep(message: Warning | str, *_: object, **__: object) -> None:
        _heard.setdefault(threading.get_ident(), []).append(str(message))

    warnings.simplefilter("always")
    warnings.showwarning = keep


@contextmanager
def heard_warnings() -> Iterator[list[str]]:
    """The warnings that this thread hears meanwhile."""
    heard: list[str] = []
    _heard[threading.get_ident()] = heard
    yield heard
