"""Which new runs are taken: names, limits, and requests that are repeated."""

import asyncio
from dataclasses import replace

import pytest

from basilica.core.errors import Conflict, DeploymentNotFound, NameInUse, QuotaExceeded
from basilica.ports import Deployment, Limits, Store
from basilica.testing.store_contract.stories import CREATED, Opens, a_run, cancelled, ended, story

A_DAY = 86400.0


class Admitting(Opens[Store]):
    """What is refused has left nothing."""

    @story
    async def test_a_live_run_holds_its_name_and_an_ended_one_does_not(self, store: Store) -> None:
        first = await store.create(a_run("train-1"))
        with pytest.raises(NameInUse) as refused:
            await store.create(a_run("train-2"))
        assert refused.value.instance == "train-1"
        with pytest.raises(DeploymentNotFound):
            await store.get("train-2")
        await store.create(a_run("train-3", user="bob"))
        await store.save_status(first, ended(first.status, 1.0, settled=False), now=1.0)
        await store.create(a_run("train-4"))

    @story
    async def test_of_many_creates_of_one_name_at_once_one_wins(self, store: Store) -> None:
        results = await asyncio.gather(*(store.create(a_run(f"train-{n}")) for n in range(20)), return_exceptions=True)
        assert sum(isinstance(result, Deployment) for result in results) == 1
        assert sum(isinstance(result, NameInUse) for result in results) == 19
        assert len(await store.deployments()) == 1

    @story
    async def test_an_instance_name_is_given_once_and_for_ever(self, store: Store) -> None:
        await store.create(a_run("train-1"))
        with pytest.raises(Conflict, match="train-1"):
            await store.create(a_run("train-1", name="other"))
        assert (await store.get("train-1")).spec.name == "train"
        await store.delete("train-1")
        with pytest.raises(Conflict, match="train-1"):
            await store.create(a_run("train-1"))

    @story
    async def test_limits_count_what_is_live_of_one_user(self, store: Store) -> None:
        limits = Limits(deployments=2, ranks=5)
        first = await store.create(a_run("a", name="a", target=2), limits=limits)
        with pytest.raises(QuotaExceeded) as ranks:
            await store.create(a_run("b", name="b", target=4), limits=limits)
        assert (ranks.value.what, ranks.value.limit, ranks.value.current, ranks.value.requested) == ("ranks", 5, 2, 4)
        await store.create(a_run("b", name="b", target=3), limits=limits)
        with pytest.raises(QuotaExceeded) as runs:
            await store.create(a_run("c", name="c", target=1), limits=limits)
        assert (runs.value.what, runs.value.limit, runs.value.current) == ("deployments", 2, 2)
        await store.create(a_run("d", name="d", user="bob", target=5), limits=limits)
        await store.save_status(first, ended(first.status, 1.0), now=1.0)
        await store.create(a_run("c", name="c", target=2), limits=limits)

    @story
    async def test_scaling_up_is_limited_and_scaling_down_is_not(self, store: Store) -> None:
        await store.create(a_run(target=3))
        with pytest.raises(QuotaExceeded):
            await store.change_spec("train-1", lambda d: d.spec.scaled(6), limits=Limits(ranks=5))
        assert (await store.get("train-1")).spec.world.target == 3
        await store.change_spec("train-1", lambda d: d.spec.scaled(5), limits=Limits(ranks=5))
        await store.change_spec("train-1", lambda d: d.spec.scaled(4), limits=Limits(ranks=2))

    @story
    async def test_a_create_repeated_with_its_key_gives_the_first_one_s_run(self, store: Store) -> None:
        first = await store.create(a_run("train-1"), [CREATED], idempotency_key="k")
        assert await store.create(a_run("train-2"), [CREATED], idempotency_key="k") == first
        now = await store.change_spec("train-1", cancelled)
        assert await store.create(a_run("train-3"), [CREATED], idempotency_key="k") == now
        assert [d.instance for d in await store.deployments()] == ["train-1"]
        assert [e.count for e in await store.events("train-1")] == [1]

    @story
    async def test_an_idempotency_key_stands_for_one_spec_of_one_user(self, store: Store) -> None:
        await store.create(a_run("train-1"), idempotency_key="k")
        with pytest.raises(Conflict, match="another request"):
            await store.create(a_run("train-2", name="other"), idempotency_key="k")
        await store.create(a_run("train-3", user="bob"), idempotency_key="k")
        assert len(await store.deployments()) == 2

    @story
    async def test_the_order_of_variables_makes_no_other_request(self, store: Store) -> None:
        new = a_run()
        one = replace(new, spec=replace(new.spec, env={"A": "1", "B": "2"}))
        two = replace(new, spec=replace(new.spec, env={"B": "2", "A": "1"}))
        assert await store.create(one, idempotency_key="k") == await store.create(two, idempotency_key="k")

    @story
    async def test_a_refused_create_leaves_its_idempotency_key_free(self, store: Store) -> None:
        with pytest.raises(QuotaExceeded):
            await store.create(a_run(target=2), idempotency_key="k", limits=Limits(ranks=1))
        await store.create(a_run(target=1), idempotency_key="k", limits=Limits(ranks=1))

    @story
    async def test_an_idempotency_key_is_forgotten_after_a_day_and_with_its_run(self, store: Store) -> None:
        await store.create(a_run("train-1", created_at=0.0), idempotency_key="k")
        with pytest.raises(NameInUse):
            await store.create(a_run("train-2", created_at=A_DAY), idempotency_key="k")
        await store.create(a_run("train-3", name="other", created_at=A_DAY), idempotency_key="l")
        await store.delete("train-3")
        await store.create(a_run("train-4", name="third", created_at=A_DAY), idempotency_key="l")
