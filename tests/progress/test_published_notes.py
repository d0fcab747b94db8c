"""The notes of a rank's process in the published form of its activity."""

import json
from dataclasses import replace

import pytest

from basilica.core.seen import SeenRefusal, SeenRestore, SeenSaved, SeenSaving
from basilica.progress.activity import Activity
from basilica.progress.published import PublishedActivity, encode, parse

SAVING = SeenSaving(
    process_at=1.5,
    at=9.25,
    restored=SeenRestore(step=40, tier="disk", seconds=0.5, began_at=2.0, at=2.5),
    blocked_seconds=0.125,
    snapshots=7,
    every=5,
    saved=(SeenSaved(tier="memory", step=45, size=1 << 40, at=9.0),),
    refusals=(SeenRefusal(pid=7, number=1, what="shard 0 of step 45 is corrupt"),),
)


def published(saving: SeenSaving) -> PublishedActivity:
    return PublishedActivity(attempt=1, activity=Activity(saving=saving))


def test_notes_are_parsed_as_they_were_encoded() -> None:
    assert parse(encode(published(SAVING))) == published(SAVING)


def test_snapshots_alone_wake_nobody_and_restores_and_refusals_do() -> None:
    later = replace(SAVING, at=10.0, blocked_seconds=0.5, snapshots=8, saved=())
    assert published(later).is_same_but_for_steps(published(SAVING))
    assert not published(replace(SAVING, restoring_since=3.0)).is_same_but_for_steps(published(SAVING))
    assert not published(replace(SAVING, refusals=())).is_same_but_for_steps(published(SAVING))


@pytest.mark.parametrize(
    "facts",
    [
        {"blocked_seconds": -1},
        {"saved": [{}]},
        {"saved": [{"tier": "m", "step": 1, "size": -1, "at": 1}]},
        {"refusals": [{"pid": 1, "number": 1, "what": "x"}] * 17},
        {"restored": []},
    ],
)
def test_notes_that_no_agent_wrote_are_none(facts: dict[str, object]) -> None:
    value = json.loads(encode(published(SAVING)))
    value["saving"] |= facts
    found = parse(json.dumps(value))
    assert found is not None
    assert found.activity.saving is None
