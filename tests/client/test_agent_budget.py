"""Whose failure the fall of torchrun's workers is: the agent's own, or the echo of a peer's."""

from dataclasses import dataclass
from typing import Any

import pytest

from basilica.rendezvous.torch_agent import by_themselves, how_it_fell, pays

GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]"


@dataclass
class Failure:
    exitcode: int
    message: Any


@pytest.mark.parametrize(
    ("failures", "kind"),
    [
        ([Failure(1, {"message": "ValueError: bad batch"})], "own"),
        ([Failure(1, "ValueError: bad batch")], "own"),
        ([Failure(3, "To enable traceback see: https://pytorch.org")], "own"),
        ([Failure(-9, "Signal 9 (SIGKILL) received by PID 5")], "own"),
        ([Failure(1, {"message": GLOO})], "echo"),
        ([Failure(1, {"message": "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp"})], "echo"),
        ([Failure(1, {"message": "ConnectionResetError: [Errno 104] Connection reset by peer"})], "echo"),
        ([Failure(-6, "Signal 6 (SIGABRT) received by PID 5")], "echo"),
        ([Failure(1, {"message": GLOO}), Failure(1, {"message": "KeyError: 'x'"})], "own"),
    ],
)
def test_a_worker_that_names_a_lost_peer_fell_as_an_echo(failures: list[Failure], kind: str) -> None:
    assert how_it_fell(failures) == kind


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
