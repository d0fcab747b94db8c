"""What every `Keys` promises."""

import pytest

from basilica.core.errors import Conflict
from basilica.ports import ApiKey, Keys
from basilica.testing.store_contract.stories import Opens, story


class KeysContract(Opens[Keys]):
    """API keys, by digest."""

    @story
    async def test_a_key_is_found_by_its_digest_until_it_is_revoked(self, keys: Keys) -> None:
        key = _a_key("k1", "d1")
        await keys.add_key(key)
        assert await keys.find_key("d1") == key
        assert await keys.find_key("d2") is None
        assert await keys.revoke_key("k1")
        assert await keys.find_key("d1") is None
        assert not await keys.revoke_key("k1")

    @story
    async def test_keys_are_listed_in_the_order_they_were_made(self, keys: Keys) -> None:
        for id, at in (("b", 2.0), ("c", 1.0), ("a", 2.0)):
            await keys.add_key(_a_key(id, f"digest of {id}", at))
        assert [key.id for key in await keys.keys()] == ["c", "a", "b"]

    @story
    async def test_neither_an_id_nor_a_digest_is_taken_twice(self, keys: Keys) -> None:
        await keys.add_key(_a_key("k1", "d1"))
        for key in (_a_key("k1", "d2"), _a_key("k2", "d1")):
            with pytest.raises(Conflict):
                await keys.add_key(key)
        assert len(await keys.keys()) == 1


def _a_key(id: str, digest: str, at: float = 1.0) -> ApiKey:
    return ApiKey(id=id, user="ann", digest=digest, created_at=at, note="for tests")
