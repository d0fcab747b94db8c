"""What the agents of a round tell each other once it is final, and what is said for one that is gone. Pure.

Agents wait for each other's words in the round's own store, up to 300 s and without looking at anything else, and end
if they wait in vain. So one that dies after it has confirmed, and before it has spoken, would take the others with it.

A round trains no more once somebody waits for the next one. What is missing of its introductions is then said in the
place of whoever should have: the others get on, see that they are to meet again, and do so without a failure. No worker
lives long enough to make use of it.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass

from basilica.rendezvous.elastic import UnknownShape, is_count

NOWHERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the place of the first agent's store
ROLE, ASSIGNED = "torchelastic/role_info/", "torchelastic/assigned_ranks/"


@dataclass(frozen=True, slots=True)
class _Role:
    """How many workers an agent has, under which name."""

    name: str
    workers: int


def missing_words(store: str, told: Mapping[str, str], members: int) -> dict[str, str]:
    """What to write so that all `members` agents of a round get on, by key.

    `told` are the keys and values below `store`, the folder of the round's store. Agents first say where their store is
    and only then who they are, so it may take another look to know what else is missing.
    """
    words = dict(NOWHERE)
    keys = {n: _key(store, f"{ROLE}{n}") for n in range(members)}
    known = {n: _parse_role(told[key]) for n, key in keys.items() if key in told}
    if known:
        like_the_others = next(iter(known.values()))
        roles = [known.get(n, like_the_others) for n in range(members)]
        words |= _roles(roles) | _assignments(roles)
    missing = {_key(store, name): _encoded(value) for name, value in words.items()}
    return {key: value for key, value in missing.items() if key not in told}


def introduced(store: str, told: Mapping[str, str], members: int) -> bool:
    """True if no agent of the round has anything to wait for."""
    return all(_key(store, f"{ASSIGNED}{n}") in told for n in range(members))


def _roles(roles: list[_Role]) -> dict[str, str]:
    return {
        f"{ROLE}{n}": json.dumps({"role": role.name, "rank": n, "local_world_size": role.workers})
        for n, role in enumerate(roles)
    }


def _assignments(roles: list[_Role]) -> dict[str, str]:
    """The first number of each agent's workers among all and among those of its role, as the first agent gives them."""
    words = {}
    for n, role in enumerate(roles):
        before, alike = roles[:n], [other.workers for other in roles if other.name == role.name]
        first, total = sum(other.workers for other in before), sum(other.workers for other in roles)
        first_alike = sum(other.workers for other in before if other.name == role.name)
        words[f"{ASSIGNED}{n}"] = json.dumps([first, total, first_alike, sum(alike)])
    return words


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
