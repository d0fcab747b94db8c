"""Whose failure the fall of torchrun's workers is: the agent's own, or the echo of a peer's."""

import pytest

from basilica.rendezvous import torch_agent, torch_budget
from basilica.rendezvous.torch_agent import kind_of_fall
from basilica.rendezvous.torch_budget import how_it_fell, pays

GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]"


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (1, "ValueError: bad batch", "own"),
        (3, "", "own"),
        (-9, "", "own"),
        (1, GLOO, "echo"),
        (1, "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", "echo"),
        (1, "ConnectionResetError: [Errno 104] Connection reset by peer", "echo"),
        (-6, "", "echo"),
    ],
)
def test_a_worker_that_names_a_lost_peer_fell_as_an_echo(code: int, message: str, kind: str) -> None:
    assert kind_of_fall(code, message) == kind


def test_the_two_texts_that_travel_use_the_same_words() -> None:
    for name in ("OWN", "AS_ECHO", "DONE", "WORKERS"):
        assert getattr(torch_budget, name) == getattr(torch_agent, name)


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        (["echo"], "echo"),
        (["echo", "echo"], "echo"),
        (["echo", "done"], "echo"),
        (["own"], "own"),
        (["echo", "own"], "own"),
        pytest.param([], "own", id="torch gave a worker up that did not end"),
    ],
)
def test_one_worker_that_fell_on_its_own_makes_the_fall_the_agents_own(kinds: list[str], kind: str) -> None:
    assert how_it_fell(kinds) == kind


ECHO = ("echo", 5.0)


@pytest.mark.parametrize(
    ("before", "members", "paid"),
    [
        pytest.param({"0/0", "1/0"}, {"0/0": ECHO, "1/1": ("", 0)}, False, id="a peer was started again"),
        pytest.param({"0/0", "1/0"}, {"0/0": ECHO}, False, id="a peer is gone"),
        pytest.param({"0/0"}, {"0/0": ECHO, "1/0": ("", 0)}, False, id="the world grows"),
        pytest.param({"0/0", "1/0"}, {"0/0": ECHO, "1/0": ("own", 9.0)}, False, id="a peer has paid"),
        pytest.param({"0/0", "1/0"}, {"0/0": ECHO, "1/0": ("", 0)}, True, id="nobody else fell"),
        pytest.param({"0/0", "1/0"}, {"0/0": ECHO, "1/0": ("echo", 5.1)}, True, id="the first of all"),
        pytest.param({"0/0", "1/0"}, {"0/0": ECHO, "1/0": ("echo", 4.9)}, False, id="not the first"),
        pytest.param({"0/0", "1/0"}, {"0/0": ECHO, "1/0": ECHO}, True, id="one of two at the same moment"),
        pytest.param(set(), {"0/0": ECHO, "1/0": ("", 0)}, False, id="the round before is not known"),
    ],
)
def test_an_echo_costs_nothing_while_somebody_else_is_to_blame(
    before: set[str], members: dict[str, tuple[str, float]], paid: bool
) -> None:
    assert pays("0/0", before, members) is paid


def test_of_two_at_the_same_moment_only_one_pays() -> None:
    members = {"0/0": ECHO, "1/0": ECHO}
    assert [pays(name, set(members), members) for name in sorted(members)] == [True, False]
