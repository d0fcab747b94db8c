"""The directory that ranks run in, as it was sent."""

import asyncio
import random
import sys
import time

import pytest

from basilica.core.errors import ValidationError
from basilica.core.spec import Exec
from basilica.progress.snapshot_file import HEADER_BYTES, Header, encode_header
from basilica.testing.runtime_contract.world import (
    Opens,
    World,
    packed,
    story,
)

HEADER = Header(
    step=7,
    before=0,
    world=1,
    rank=0,
    line="",
    keeper=True,
    sharded=True,
    planned=False,
    layout="",
    bytes=3,
    sealed_at=1e9,
    algorithm="crc32",
    manifest=(HEADER_BYTES, 0),
    checksum="",
)


class Directories(Opens):
    """Archives are kept for as long as they are used, and do no harm."""

    @story
    async def test_an_archive_that_nobody_sent_is_not_there(self, world: World) -> None:
        assert not await world.runtime.has_archive("ada", "0" * 64)

    @story
    async def test_ranks_run_in_the_directory_that_was_sent(self, world: World) -> None:
        files = {"hello": "from afar\n", "tool": "#!/bin/sh\necho works", "sub/in": "x"}
        stored = await world.send("ada", packed(files))
        assert await world.runtime.has_archive("ada", stored.digest)
        assert not await world.runtime.has_archive("eve", stored.digest)
        run = world.run("cat hello; ./tool; ls; env | grep ARCHIVE; true", archive=stored.digest)
        await world.launch(run, 0, 1)
        for rank in range(2):
            assert (await world.ended(run, rank)).log_tail == ("from afar", "works", "hello", "sub", "tool")
        inside = world.run("cat in", "inside", archive=stored.digest, workdir="sub")
        await world.launch(inside, 0)
        assert (await world.ended(inside)).log_tail == ("x",)

    @story
    async def test_a_rank_finds_its_snapshots_and_checkpoints_again_in_the_next_attempt(self, world: World) -> None:
        places = '"$BASILICA_SNAPSHOT_DIR/note" "$BASILICA_CHECKPOINT_DIR/note"'
        run = world.run(
            f"cat {places} 2>/dev/null; for f in {places}; do echo attempt $BASILICA_ATTEMPT >$f; done; exit 1"
        )
        await world.launch(run, 0)
        await world.ended(run)
        await world.launch(run, 0, attempt=1)
        assert (await world.ended(run, 0, 1)).log_tail[-2:] == ("attempt 0", "attempt 0")
        assert await world.do(lambda: world.runtime.checkpoints(run)) in ((), None)

    @story
    async def test_snapshots_of_an_ended_run_leave_the_memory_and_are_still_listed(self, world: World) -> None:
        data = encode_header(HEADER) + b"abc"
        write = f"import os\nopen(os.environ['BASILICA_SNAPSHOT_DIR'] + '/0.0', 'wb').write({data!r})"
        run = world.run(Exec((sys.executable, "-c", write)))
        await world.launch(run, 0)
        assert (await world.ended(run)).exit_code == 0
        known = await world.do(lambda: world.runtime.checkpoints(run))
        if known is not None:
            assert [(each.step, each.tier, each.complete) for each in known] == [(7, "memory", True)]
        while (await world.look(run)).in_memory:
            await world.do(lambda: world.runtime.persist_snapshots(run))
            await asyncio.sleep(0.01)
        if known is not None:
            [kept] = await world.do(lambda: world.runtime.checkpoints(run))
            assert (kept.step, kept.tier, kept.bytes) == (7, "disk", 3)

    @story
    async def test_a_directory_may_be_sent_twice_and_its_files_are_as_the_last_attempt_left_them(
        self, world: World
    ) -> None:
        content = packed({f"file-{n}": random.Random(n).randbytes(300_000).hex() for n in range(6)})
        one, two = await asyncio.gather(world.send("ada", content), world.send("ada", content))
        assert one == two == await world.send("ada", content)
        assert one.bytes == len(content)
        run = world.run("cat mark; echo attempt $BASILICA_ATTEMPT >mark; exit 1", archive=one.digest)
        await world.launch(run, 0)
        await world.ended(run)
        await world.launch(run, 0, attempt=1)
        assert (await world.ended(run, 0, 1)).log_tail[-1] == "attempt 0"

    @story
    async def test_what_would_leave_its_directory_or_is_no_archive_is_refused(self, world: World) -> None:
        for content in (packed({"../out": "x"}), b"no archive"):
            with pytest.raises(ValidationError):
                await world.send("ada", content)

    @story
    async def test_old_archives_that_nobody_uses_are_forgotten(self, world: World) -> None:
        used, unused = await world.send("ada", packed({"a": "1"})), await world.send("ada", packed({"a": "2"}))
        others = await world.send("eve", packed({"a": "1"}))

        async def in_use() -> set[tuple[str, str]]:
            return {("ada", used.digest)}

        async def nobody_asks() -> set[tuple[str, str]]:
            raise AssertionError("nothing is old")

        assert await world.runtime.forget_archives(nobody_asks, time.time() - 3600) == []
        forgotten = await world.runtime.forget_archives(in_use, time.time() + 3600)
        assert sorted(forgotten) == sorted([unused.digest, others.digest])
        assert await world.runtime.has_archive("ada", used.digest)
        assert not await world.runtime.has_archive("ada", unused.digest)
        assert not await world.runtime.has_archive("eve", others.digest)
        run = world.run("cat a", archive=(await world.send("ada", packed({"a": "2"}))).digest)
        await world.launch(run, 0)
        assert (await world.ended(run)).log_tail == ("2",)
