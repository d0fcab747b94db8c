"""Announcements in a run's keyspace: how many ranks take part, which hosts may begin to train, and planned changes."""

import json
from collections.abc import Awaitable, Mapping
from dataclasses import asdict

from basilica.core.mesh import Announcement, Gate
from basilica.core.notices import Notice, NoticeKind
from basilica.rendezvous.client import Answer, KeysClient
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.keyspace import NOT_A_DIRECTORY, NOT_A_FILE
from basilica.rendezvous.names import MESH_DEGRADED, MESH_READY, NOTICE, ROOT, WORLD

GATES = {Gate.READY: MESH_READY, Gate.DEGRADED: MESH_DEGRADED}


async def announce(keys: KeysClient, says: Announcement | None, wanted: Announcement) -> None:
    """Write the announcement `wanted`. `says` is the one in the keyspace now, None if that is not known."""
    if says is None:
        says = announced((await must(keys.get(ROOT, recursive=True), absent=True)).leaves())
    if (says.world, says.admitted) != (wanted.world, wanted.admitted):
        admitted = {} if wanted.admitted is None else {"admitted": wanted.admitted}
        await _put(keys, WORLD, json.dumps({"target": wanted.world, **admitted}))
    if says.notice != wanted.notice:
        await _announce_notice(keys, wanted.notice)
    before, after = set(says.released), set(wanted.released)
    for host, gate in sorted(after - before):
        await _put(keys, f"{GATES[gate]}/{host}", gate.value)
    for host, gate in sorted(before - after):  # last: a rank that reads meanwhile must find one of its two keys
        await must(keys.delete(f"{GATES[gate]}/{host}", recursive=True), absent=True)


def announced(leaves: Mapping[str, str]) -> Announcement:
    """Parse the announcement from the keys. A host that has both keys is in it twice; a missing world is -1."""
    released = [
        (key.removeprefix(f"{folder}/"), gate)
        for gate, folder in GATES.items()
        for key in leaves
        if key.startswith(f"{folder}/")
    ]
    try:
        found = json.loads(leaves.get(WORLD, "{}"))
        world, admitted = int(found["target"]), None if found.get("admitted") is None else int(found["admitted"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError):
        world, admitted = -1, None
    return Announcement(world, tuple(sorted(released)), admitted, parse_notice(leaves.get(NOTICE, "")))


async def _announce_notice(keys: KeysClient, notice: Notice | None) -> None:
    if notice is None:
        await must(keys.delete(NOTICE, recursive=True), absent=True)
    else:
        await _put(keys, NOTICE, json.dumps(asdict(notice)))


def parse_notice(text: str) -> Notice | None:
    """Parse the notice in the keyspace; None for anything that is no notice."""
    try:
        found = json.loads(text)
        return Notice(
            number=int(found["number"]),
            kind=NoticeKind(found["kind"]),
            since=float(found["since"]),
            until=float(found["until"]),
            reason=str(found["reason"]),
            target=None if found["target"] is None else int(found["target"]),
            step=None if found["step"] is None else int(found["step"]),
            proposed_at=float(found["proposed_at"]),
            done_at=None if found.get("done_at") is None else float(found["done_at"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def changes_announcement(key: str) -> bool:
    """Whether a change of the key, or of a directory that it names, changes the announcement."""
    return any(
        f"{ours}/".startswith(f"{key}/") or key.startswith(f"{ours}/") for ours in (WORLD, NOTICE, *GATES.values())
    )


async def _put(keys: KeysClient, key: str, value: str) -> None:
    """Write a key of ours, after removing any obstacle that a rank has put there: a directory, or a file above it."""
    for _ in range(key.count("/") + 1):
        answer = await keys.put(key, value)
        if answer.body.get("errorCode") not in (NOT_A_FILE, NOT_A_DIRECTORY):
            break
        obstacle = str(answer.body.get("cause", ""))
        if not f"{key}/".startswith(f"{obstacle}/") or not obstacle.startswith("/"):
            break
        await must(keys.delete(obstacle, recursive=True), absent=True)
    _check(answer)


async def must(answer: Awaitable[Answer], *, absent: bool = False) -> Answer:
    """Return the answer, or raise `NoAnswer` if it is a refusal; `absent`: a missing key is no refusal."""
    return _check(await answer, absent=absent)


def _check(answer: Answer, *, absent: bool = False) -> Answer:
    if not (answer.ok or (absent and answer.status == 404)):
        raise NoAnswer(f"{answer.status} {answer.body.get('message', '')} {answer.body.get('cause', '')}".rstrip())
    return answer
