"""What is said in the place of agents that are gone is what torch would have had them say."""

import json
import subprocess
import sys
from base64 import b64encode

import pytest

from basilica.rendezvous.elastic import UnknownShape
from basilica.rendezvous.introductions import introduced, missing_entries

STORE = "/torchelastic/p2p/run_r/rdzv/v_1/kv"

# As torch 2.13 wrote them for agents with 2 and 1 workers of one role and 4 of another; it writes them again below.
PLACE = {"MASTER_ADDR": "host", "MASTER_PORT": "58135"}
WORDS = {
    "torchelastic/role_info/0": '{"role": "trainer", "rank": 0, "local_world_size": 2}',
    "torchelastic/role_info/1": '{"role": "trainer", "rank": 1, "local_world_size": 1}',
    "torchelastic/role_info/2": '{"role": "reader", "rank": 2, "local_world_size": 4}',
    "torchelastic/assigned_ranks/0": "[0, 7, 0, 3]",
    "torchelastic/assigned_ranks/1": "[2, 7, 2, 3]",
    "torchelastic/assigned_ranks/2": "[3, 7, 0, 4]",
}


def stored(words: dict[str, str]) -> dict[str, str]:
    return {f"{STORE}/{b64encode(n.encode()).decode()}": b64encode(v.encode()).decode() for n, v in words.items()}


def test_when_all_is_said_there_is_nothing_to_add() -> None:
    assert missing_entries(STORE, stored(PLACE | WORDS), 3) == {}
    assert introduced(STORE, stored(PLACE | WORDS), 3)


def test_the_numbers_that_a_lost_first_agent_would_have_given_are_given() -> None:
    told = {name: value for name, value in WORDS.items() if "role_info" in name}
    given = {name: value for name, value in WORDS.items() if "assigned" in name}
    assert not introduced(STORE, stored(PLACE | told), 3)
    assert missing_entries(STORE, stored(PLACE | told), 3) == stored(given)


def test_one_who_did_not_say_who_it_is_is_taken_for_one_like_the_others() -> None:
    told = {"torchelastic/role_info/0": WORDS["torchelastic/role_info/0"]}
    assert missing_entries(STORE, stored(PLACE | told), 2) == stored(
        {
            "torchelastic/role_info/1": '{"role": "trainer", "rank": 1, "local_world_size": 2}',
            "torchelastic/assigned_ranks/0": "[0, 4, 0, 4]",
            "torchelastic/assigned_ranks/1": "[2, 4, 2, 4]",
        }
    )


def test_before_anybody_said_who_it_is_only_a_place_is_named_where_nobody_listens() -> None:
    assert missing_entries(STORE, {}, 2) == stored({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    assert missing_entries(STORE, stored({"MASTER_ADDR": "host"}), 2) == stored({"MASTER_PORT": "1"})
    assert missing_entries(STORE, stored(PLACE), 2) == {}
    assert not introduced(STORE, stored(PLACE), 2)


@pytest.mark.parametrize(
    "role", ["", "[]", "7", "{}", '{"role": 1, "local_world_size": 1}', '{"role": "a"}', "[" * 9999]
)
def test_a_role_that_torch_would_not_have_written_is_refused(role: str) -> None:
    with pytest.raises(UnknownShape):
        missing_entries(STORE, stored({"torchelastic/role_info/0": role}), 2)


def test_a_role_that_is_not_even_text_is_refused_and_what_others_keep_there_does_not_matter() -> None:
    key = next(iter(stored({"torchelastic/role_info/0": ""})))
    for value in ("no base64", "/w=="):
        with pytest.raises(UnknownShape):
            missing_entries(STORE, {key: value}, 2)
    assert missing_entries(STORE, {f"{STORE}/plain": "/w=="} | stored(PLACE), 2) == {}


TORCH = """
import json, threading
from types import SimpleNamespace
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

store, agents = HashStore(), [("trainer", 2), ("trainer", 1), ("reader", 4)]

def introduce(n):
    RendezvousStoreInfo.build(n, store, "host")
    spec = SimpleNamespace(role=agents[n][0], local_world_size=agents[n][1])
    SimpleElasticAgent._assign_worker_ranks(None, store, n, len(agents), spec)

threads = [threading.Thread(target=introduce, args=(n,)) for n in range(len(agents))]
[each.start() for each in threads], [each.join() for each in threads]
names = [f"torchelastic/{what}/{n}" for what in ("role_info", "assigned_ranks") for n in range(len(agents))]
words = {name: store.get(name).decode() for name in names}
print(store.num_keys(), store.get("MASTER_ADDR").decode(), json.dumps(words))
"""


def test_the_installed_torch_says_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TORCH], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    number, address, words = done.stdout.splitlines()[-1].split(" ", 2)
    assert json.loads(words) == WORDS
    assert (int(number), address) == (len(PLACE) + len(WORDS), PLACE["MASTER_ADDR"])
