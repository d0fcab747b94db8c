"""The script of the page on planned changes: two ranks of it save at one step and go on from there."""

import re
import signal
import socket
import time
from pathlib import Path

from basilica.machine.layout import Key
from basilica.progress.answers import Answer, read_answers
from tests.progress.conftest import RUN, Place

PAGE = (Path(__file__).parents[2] / "docs/how-to/planned-changes.md").read_text()
KEYS = (Key(RUN, 0, 1), Key(RUN, 1, 1))


def wait(place: Place, number: int, *states: str) -> dict[Key, Answer]:
    """Wait until both ranks have answered the notice with one of the states."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        found = read_answers(place.layout, RUN)
        if set(found) == set(KEYS) and all(a.number == number and a.state in states for a in found.values()):
            return found
        time.sleep(0.01)
    raise AssertionError(read_answers(place.layout, RUN))


def test_the_ranks_of_the_script_save_at_one_step(place: Place, tmp_path: Path) -> None:
    import torch

    script = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    shared |= {"BASILICA_CHECKPOINT_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    place.withdraw()
    ranks = [place.start(script, 0, 1, **shared, RANK="0"), place.start(script, 1, 1, **shared, RANK="1")]
    answers, number, step = wait(place, 0, "listening"), 0, 0
    while any(answer.state != "ready" for answer in answers.values()):  # on a busy machine they may be late
        number, step = number + 1, step + 1_000 * 2**number
        place.publish(number, step=step)
        answers = wait(place, number, "ready", "late")
    assert {answer.step for answer in answers.values()} == {step}
    assert torch.load(tmp_path / "model.pt", weights_only=True)["step"] == step
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    assert [rank.wait(60) for rank in ranks] == [-signal.SIGTERM] * 2
