"""A stored record that cannot be read is one run's trouble, and nobody else's."""

from typing import Literal

import pytest

from basilica.core.damage import DamagedRun
from basilica.core.errors import DeploymentDamaged, DeploymentNotFound, NameInUse
from basilica.core.spec import Wanted
from basilica.ports import Store
from basilica.testing.store_contract.stories import CREATED, Opens, a_run, story

Part = Literal["spec", "status"]


class Damage(Opens[Store]):
    """Say how yours is damaged; for a store that nothing outside can damage, these stories are skipped."""

    async def damage(self, store: Store, instance: str, part: Part) -> None:
        """Spoil that part of the stored record of a run that the controller has turned, behind the store's back, so
        that the store knows of it."""
        pytest.skip("nothing outside this store can damage what it holds")

    async def three_with_one_damaged(self, store: Store, part: Part) -> DamagedRun:
        for name in ("first", "second", "third"):
            made = await store.create(a_run(f"{name}-1", name=name), [CREATED])
            await store.save_status(made, made.status, [CREATED], now=1.0)
        await self.damage(store, "second-1", part)
        (damaged,) = [found for found in await store.listed("u-ann") if isinstance(found, DamagedRun)]
        return damaged

    @story
    async def test_a_damaged_spec_is_listed_among_the_others(self, store: Store) -> None:
        await self._is_listed(store, "spec")

    @story
    async def test_a_damaged_status_is_listed_among_the_others(self, store: Store) -> None:
        await self._is_listed(store, "status")

    async def _is_listed(self, store: Store, part: Part) -> None:
        damaged = await self.three_with_one_damaged(store, part)
        assert (damaged.instance, damaged.user, damaged.namespace) == ("second-1", "ann", "u-ann")
        assert damaged.problem
        names = [found.instance for found in await store.listed("u-ann")]
        assert names == ["third-1", "second-1", "first-1"]
        assert [found.instance for found in await store.deployments("u-ann")] == ["third-1", "first-1"]
        assert await store.listed("u-bob") == []

    @story
    async def test_a_damaged_run_is_named_to_its_owner_and_not_there_for_others(self, store: Store) -> None:
        await self.three_with_one_damaged(store, "status")
        for asked in (store.get("second-1"), store.find("u-ann", "second-1")):
            with pytest.raises(DeploymentDamaged, match=r"second-1.*cannot be read.*delete the run.*repair"):
                await asked
        with pytest.raises(DeploymentNotFound):
            await store.find("u-bob", "second-1")
        assert (await store.find("u-ann", "third")).instance == "third-1"

    @story
    async def test_a_run_with_a_damaged_spec_can_be_made_to_end_and_go(self, store: Store) -> None:
        await self._ends_and_goes(store, "spec")

    @story
    async def test_a_run_with_a_damaged_status_can_be_made_to_end_and_go(self, store: Store) -> None:
        await self._ends_and_goes(store, "status")

    async def _ends_and_goes(self, store: Store, part: Part) -> None:
        damaged = await self.three_with_one_damaged(store, part)
        going = await store.condemn(damaged.instance)
        assert (going.instance, going.namespace, going.spec.wanted) == ("second-1", "u-ann", Wanted.DELETE)
        assert going.status.observed_generation < going.spec.generation
        assert "second-1" in await store.live()
        turned = await store.get("second-1")
        saved = await store.save_status(turned, turned.status, [CREATED], now=2.0)
        assert saved.spec.wanted is Wanted.DELETE
        await store.delete("second-1")
        with pytest.raises(DeploymentNotFound):
            await store.get("second-1")

    @story
    async def test_the_others_go_on(self, store: Store) -> None:
        await self.three_with_one_damaged(store, "spec")
        scaled = await store.change_spec("third-1", lambda d: d.spec.scaled(3))
        assert scaled.spec.world.target == 3
        with pytest.raises(NameInUse):
            await store.create(a_run("third-2", name="third"))
        await store.create(a_run("fourth-1", name="fourth"))
