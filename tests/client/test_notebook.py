"""In a notebook a handle is a small table that is kept current, by the real IPython."""

from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import basilica
from basilica.client.notebook import table
from basilica.client.views import parse_run
from tests.client.lying_server import lying, run_body, sequence


@pytest.mark.filterwarnings("ignore")
def test_the_table_changes_with_the_run() -> None:
    ours: Any = {"generation": 1, "observedGeneration": 1, "blockedOn": "all is well"}
    running = run_body(ready=1, version=1, running=[0], **ours)
    ended = run_body("succeeded", version=2, settled=True, **ours)
    InteractiveShell.instance()
    with lying(sequence((200, running), (200, running), (200, ended))) as server:
        client = basilica.BasilicaClient(server.url, "k")
        training = basilica.DistributedTraining(client, "run-1")
        with capture_output() as captured:
            training._ipython_display_()
            training._shown.join(10)
        client.close()
    shown = [output.data["text/html"] for output in captured.outputs]
    assert "<b>ready</b>" in shown[0]
    assert "<b>succeeded</b>" in shown[-1]
    assert captured.outputs[-1].metadata is not None


def test_nothing_that_a_run_says_is_markup() -> None:
    body = run_body(blockedOn="<script>alert(1)</script>", generation=1) | {"friendlyName": "<b>x</b>"}
    html = table(parse_run(body))
    assert "<script>" not in html
    assert "&lt;b&gt;x" in html
