"""Introductions: the entries that the agents of a final round publish to each other, and their replacements for an
agent that is gone. Pure.

Agents wait for each other's entries in the round's own store, up to 300 s and without checking anything else, and end
if they wait in vain. So an agent that dies between its confirmation and its entry would take the others with it.

A round trains no more once an agent waits for the next one. Its missing entries are then written in place of the
missing agents: the others get on, see that they are to meet again, and do so without a failure. No worker lives long
enough to make use of them.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass

from basilica.rendezvous.elastic import UnknownShape, is_count

NOWHERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the address of the first agent's store
ROLE, ASSIGNED = "torchelastic/role_info/", "torchelastic/assigned_ranks/"


@dataclass(frozen=True, slots=True)
class _Role:
    """The name of an agent's role and its number of workers."""

    name: str
    workers: int


def missing_entries(store: str, published: Mapping[str, str], members: int) -> dict[str, str]:
    """Return the entries, by key, to write so that all `members` agents of a round get on.

    `published` are the keys and values below `store`, the folder of the round's store. Agents first publish where their
    store is and only then their role, so it may take another read to know the other missing entries.
    """
    entries = dict(NOWHERE)
    keys = {n: _key(store, f"{ROLE}{n}") for n in range(members)}
    known = {n: _parse_role(published[key]) for n, key in keys.items() if key in published}
    if known:
        like_the_others = next(iter(known.values()))
        roles = [known.get(n, like_the_others) for n in range(members)]
        entries |= _roles(roles) | _assignments(roles)
    missing = {_key(store, name): _encoded(value) for name, value in entries.items()}
    return {key: value for key, value in missing.items() if key not in published}


def introduced(store: str, published: Mapping[str, str], members: int) -> bool:
    """Whether no agent of the round has an entry left to wait for."""
    return all(_key(store, f"{ASSIGNED}{n}") in published for n in range(members))


def _roles(roles: list[_Role]) -> dict[str, str]:
    return {
        f"{ROLE}{n}": json.dumps({"role": role.name, "rank": n, "local_world_size": role.workers})
        for n, role in enumerate(roles)
    }


def _assignments(roles: list[_Role]) -> dict[str, str]:
    """Return the first number of each agent's workers among all and among those of its role, as the first agent gives
    them.
    """
    entries = {}
    for n, role in enumerate(roles):
        before, alike = roles[:n], [other.workers for other in roles if other.name == role.name]
        first, total = sum(other.workers for other in before), sum(other.workers for other in roles)
        first_alike = sum(other.workers for other in before if other.name == role.name)
        entries[f"{ASSIGNED}{n}"] = json.dumps([first, total, first_alike, sum(alike)])
    return entries


def _parse_role(value: str) -> _Role:
    try:
        text = b64decode(value, validate=True).decode()
    except ValueError:
        raise UnknownShape(f"has the role {value[:200]!r}") from None
    try:
        fields = json.loads(text)
        name, workers = fields["role"], fields["local_world_size"]
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        raise UnknownShape(f"has the role {text[:200]!r}") from None
    if not isinstance(name, str) or not is_count(workers):
        raise UnknownShape(f"has the role {text[:200]!r}")
    return _Role(name, workers)


def _key(store: str, name: str) -> str:
    return f"{store}/{_encoded(name)}"


def _encoded(text: str) -> str:
    return b64encode(text.encode()).decode()
