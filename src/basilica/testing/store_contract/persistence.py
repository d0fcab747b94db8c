"""What is written is kept and found."""

from dataclasses import replace

import pytest

from basilica.core.errors import DeploymentNotFound
from basilica.core.phase import Phase, RankPhase
from basilica.core.spec import BenchOnStart, DeploymentSpec, Exec, Gpus, Resources
from basilica.core.status import BenchStatus, Condition, DeploymentStatus, Milestone, Resize, Usage, WorldSample
from basilica.core.world import RankExit, RankStatus, WorldSize
from basilica.ports import Store
from basilica.testing.store_contract.stories import CREATED, Opens, a_run, cancelled, ended, story


class Keeping(Opens[Store]):
    """What was written is read as it was, by all of its names."""

    @story
    async def test_a_run_reads_back_as_it_was_written(self, store: Store) -> None:
        everything = replace(
            a_run(),
            spec=DeploymentSpec(
                name="train",
                program=Exec(("python", "-c", "print('ü')", "")),
                world=WorldSize(1, 2, 3),
                env={"A": "1", "B": ""},
                secrets={"TOKEN": "s3cret"},
                nccl_env={"NCCL_DEBUG": "INFO"},
                resources=Resources(cpu=0.5, memory_bytes=1 << 40, gpus=Gpus(2, ("H100",), 80)),
                bench=BenchOnStart("strict"),
                workdir="/tmp",
                deadline_seconds=0.1,
            ),
            status=DeploymentStatus(
                created_at=1234.000001,
                phase=Phase.DEGRADED,
                message="waiting",
                ranks=(RankStatus(rank=1, attempt=3, phase=RankPhase.RUNNING, started_at=1.5),),
                exits=(_an_exit(0, log_tail=("one", "two\n")),),
                failures=(_an_exit(None),),
                conditions=(Condition(type="Ready", status="False", reason="r", message="m", since=1.0),),
                bench=BenchStatus(message="off"),
                usage=Usage(0.1, 0.2),
                history=(WorldSample(1.0, 2, 1),),
                last_resize=Resize(1.0, 1, 2, "asked"),
                milestones=(Milestone("ready", 2.0),),
                warned=("no gpu",),
            ),
        )
        created = await store.create(everything)
        assert created == replace(everything, version=created.version, owner=created.owner)
        assert await store.get("train-1") == created

    @story
    async def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        for name in ("nobody", "", "a/b", "ü", "\ud800", "nul\0"):
            with pytest.raises(DeploymentNotFound):
                await store.get(name)
            with pytest.raises(DeploymentNotFound):
                await store.find("u-ann", name)
            assert await store.events("nobody") == []
        with pytest.raises(DeploymentNotFound):
            await store.change_spec("nobody", cancelled)
        with pytest.raises(DeploymentNotFound):
            await store.save_status(a_run(), a_run().status, [CREATED], now=1.0)
        await store.delete("nobody")

    @story
    async def test_a_run_is_found_by_its_instance_name_or_as_the_newest_of_its_name(self, store: Store) -> None:
        first = await store.create(a_run("train-1"))
        await store.save_status(first, ended(first.status, 1.0), now=1.0)
        second = await store.create(a_run("train-2"))
        assert await store.find("u-ann", "train") == second
        assert (await store.find("u-ann", "train-1")).instance == "train-1"

    @story
    async def test_an_instance_name_goes_before_a_friendly_name(self, store: Store) -> None:
        await store.create(a_run("train-1", name="other"))
        await store.create(a_run("train-2", name="train-1"))
        assert (await store.find("u-ann", "train-1")).instance == "train-1"

    @story
    async def test_another_namespace_s_run_is_not_found(self, store: Store) -> None:
        await store.create(a_run("train-1", user="ann"))
        for name in ("train", "train-1"):
            with pytest.raises(DeploymentNotFound):
                await store.find("u-bob", name)
        bobs = await store.create(a_run("train-2", name="train-1", user="bob"))
        assert await store.find("u-bob", "train-1") == bobs

    @story
    async def test_a_listing_is_of_one_namespace_or_of_all_newest_first(self, store: Store) -> None:
        for number, user in enumerate(("ann", "bob", "ann")):
            await store.create(a_run(f"run-{number}", name=f"run-{number}", user=user))
        assert [d.instance for d in await store.deployments("u-ann")] == ["run-2", "run-0"]
        assert [d.instance for d in await store.deployments()] == ["run-2", "run-1", "run-0"]
        assert await store.deployments("u-nobody") == []


def _an_exit(code: int | None, log_tail: tuple[str, ...] = ()) -> RankExit:
    return RankExit(
        rank=0,
        attempt=1,
        exit_code=code,
        termination_reason="Unknown" if code is None else "Completed",
        restart_count=0,
        finished_at=3.25,
        seen_at=3.5,
        log_tail=log_tail,
    )
