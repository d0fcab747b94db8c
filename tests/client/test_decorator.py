"""`basilica.distributed`, with a client that only takes notes."""

import asyncio
import os
from typing import Any

import pytest

from basilica.client import api
from basilica.client.decorator import Distributed, distributed
from basilica.core.world import WorldSize

SIZE = WorldSize(1, 2, 4)


class Noting:
    """What `deploy_distributed` was called with; the handle is its name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str | None, dict[str, Any]]] = []

    def deploy_distributed(self, name: str | None = None, **options: Any) -> str:
        self.calls.append((name, options))
        return f"handle of {name}"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Noting:
    client = Noting()
    monkeypatch.setattr(api, "BasilicaClient", lambda: client)
    return client


@distributed(world_size=SIZE, max_restarts=2, name="train")
def train(epochs: int, lr: float = 0.1) -> dict[str, str]:
    """Learn."""
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}


def test_calling_it_deploys_and_returns_the_handle(client: Noting) -> None:
    handle: Any = train(3, lr=0.2)
    assert handle == "handle of train"
    (name, options), *_ = client.calls
    assert name == "train"
    assert options == {
        "source": train.__wrapped__,
        "source_args": (3,),
        "source_kwargs": {"lr": 0.2},
        "world_size": SIZE,
        "max_restarts": 2,
    }


def test_options_can_be_overridden_for_one_run_or_for_all_that_follow(client: Noting) -> None:
    other = Noting()
    train.deploy(client=other, name="mine", args=[1], kwargs={"lr": 1}, max_restarts=0)  # type: ignore[arg-type]
    assert other.calls[0][0] == "mine"
    assert other.calls[0][1]["max_restarts"] == 0
    train.options(max_restarts=9)(1)
    train(1)
    assert [options["max_restarts"] for _, options in client.calls] == [9, 2]


def test_locally_it_is_rank_0_of_1_for_the_time_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    found = train.local(1)
    assert found.pop("MASTER_PORT").isdigit()
    assert found == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    assert os.environ["RANK"] == "7"
    assert "WORLD_SIZE" not in os.environ
    assert "BASILICA_WORLD_MAX" not in os.environ


def test_a_coroutine_function_is_awaited_locally() -> None:
    @distributed(world_size=SIZE)
    async def later() -> str:
        await asyncio.sleep(0)
        return os.environ["RANK"]

    assert asyncio.run(later.local()) == "0"


def test_it_looks_like_the_function() -> None:
    assert (train.__name__, train.__doc__) == ("train", "Learn.")
    assert repr(train) == "<distributed train>"
    assert isinstance(train, Distributed)


def test_without_parentheses_the_options_come_with_the_run(client: Noting) -> None:
    @distributed
    def f() -> None: ...

    f.deploy(world_size=SIZE)
    assert client.calls[0][1]["world_size"] is SIZE


def test_with_a_command_it_deploys_at_once(client: Noting) -> None:
    handle: Any = distributed(command=["python", "train.py"], world_size=SIZE, name="direct")
    assert handle == "handle of direct"
    assert client.calls == [("direct", {"command": ["python", "train.py"], "world_size": SIZE})]
