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


def test_the_account_of_a_run_is_a_table() -> None:
    seconds = {"training": 75.0, "rendezvous": 25.0, "<b>": 10.0, "queued": 0.0}
    goodput = basilica.Goodput(wall_seconds=55.0, rank_seconds=110.0, least=0.68, most=0.68, seconds=seconds)
    html = goodput._repr_html_()
    assert "largest loss: rendezvous 12 s" in html
    assert "<td>rendezvous</td><td>25 s</td><td>22.7 %</td>" in html
    assert "queued" not in html
    assert "<td>&lt;b&gt;</td>" in html


def test_the_table_of_a_run_has_its_goodput_and_where_the_time_of_ranks_goes() -> None:
    body = run_body(running=[0], generation=1, goodput={"wallSeconds": 10, "rankSeconds": 10, "seconds": {}})
    body["distributed"]["ranks"][0]["cause"] = "rendez<vous"
    html = table(parse_run(body))
    assert "goodput" in html
    assert "<td>rendez&lt;vous</td>" in html
