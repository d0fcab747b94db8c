"""What a run's keyspace tells its ranks: how many of them take part, and which hosts may go."""

import json
from collections.abc import Awaitable, Mapping

from basilica.core.mesh import Announcement, Gate
from basilica.rendezvous.client import Answer, KeysClient
from basilica.rendezvous.exchange import NoAnswer
from basilica.rendezvous.names import MESH_DEGRADED, MESH_READY, ROOT, WORLD

GATES = {Gate.READY: MESH_READY, Gate.DEGRADED: MESH_DEGRADED}


async def announce(keys: KeysClient, says: Announcement | None, wanted: Announcement) -> None:
    """Have the keyspace say exactly this. `says` is what it says now, None if that is not known."""
    if says is None:
        says = announced((await must(keys.get(ROOT, recursive=True), absent=True)).leaves())
    if says.world != wanted.world:
        await must(keys.put(WORLD, json.dumps({"target": wanted.world})))
    before, after = set(says.released), set(wanted.released)
    for host, gate in sorted(after - before):
        await must(keys.put(f"{GATES[gate]}/{host}", gate.value))
    for host, gate in sorted(before - after):  # last: a rank that looks meanwhile must find one of its two keys
        await must(keys.delete(f"{GATES[gate]}/{host}"), absent=True)


def announced(leaves: Mapping[str, str]) -> Announcement:
    """What the keys say, by name. A host that has both keys is in it twice; without a world it is -1."""
    released = [
        (key.removeprefix(f"{folder}/"), gate)
        for gate, folder in GATES.items()
        for key in leaves
        if key.startswith(f"{folder}/")
    ]
    try:
        world = int(json.loads(leaves.get(WORLD, "{}"))["target"])
    except (ValueError, KeyError, TypeError):
        world = -1
    return Announcement(world, tuple(sorted(released)))


async def must(answer: Awaitable[Answer], *, absent: bool = False) -> Answer:
    """The answer, `NoAnswer` if it is a refusal; `absent`: that there is no such key is fine."""
    found = await answer
    if not (found.ok or (absent and found.status == 404)):
        raise NoAnswer(f"{found.status} {found.body.get('message', '')}")
    return found
