"""What ranks get and give back here: values in their command lines, archives, results, commands beside them."""

import asyncio
import errno
import io
import json
import os
import sys
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO

import pytest

from basilica.core.errors import Conflict, RuntimeUnavailable, ValidationError
from basilica.core.seen import Sight
from basilica.core.spec import Exec
from basilica.core.world import WorldSize
from basilica.ports import Exited, Output
from basilica.runtimes.local.run_files import RESULT_BYTES_MAX
from basilica.runtimes.local.runtime import LocalRuntime
from basilica.shipping import unpack as archives
from basilica.shipping.pack import pack
from basilica.shipping.source import ship
from tests.runtime_local.machine import SLEEP, Machine, python, sh, until_gone

# ---- values in command lines ----------------------------------------------------------------------------------------


async def test_the_rank_own_values_stand_in_its_command_line(machine: Machine) -> None:
    words = [
        "$RANK/${WORLD_SIZE}",
        "$BASILICA_WORLD_MIN:$BASILICA_WORLD_MAX",
        "--id=${BASILICA_RDZV_ID}",
        "$LOCAL_RANK$RANK",
        "$MASTER_ADDR",
        "$NODE_NAME",
    ]
    async with machine.control_plane(node="here"):
        run = machine.run(Exec(("printf", "%s|", *words)), world=WorldSize(1, 2, 4))
        await machine.launch(run, 0, 1)
        lines = [(await machine.until_ended(run, rank)).log_tail[0] for rank in (0, 1)]
    assert lines == [f"{rank}/2|1:4|--id=train-x|0{rank}|127.0.0.1|here|" for rank in (0, 1)]


async def test_everything_else_arrives_as_it_was_given(machine: Machine) -> None:
    words = [
        "$HOME",
        "$RANKS",
        "${RANK",
        "$ RANK",
        "$BASILICA_NOTHING",
        "$$",
        "`id`",
        "$(id)",
        "%RANK%",
        "$basilica_rank",
    ]
    async with machine.control_plane():
        ended = await machine.outcome(machine.run(Exec(("printf", "%s|", *words))))
    assert ended.log_tail == ("|".join(words) + "|",)


async def test_a_secret_does_not_come_into_a_command_line(machine: Machine) -> None:
    program = Exec(("printf", "%s|", "$BASILICA_TOKEN", "$BASILICA_OPEN", "$MASTER_ADDR"))
    secrets = {"BASILICA_TOKEN": "s3cret", "MASTER_ADDR": "10.0.0.1"}
    async with machine.control_plane():
        ended = await machine.outcome(machine.run(program, env={"BASILICA_OPEN": "shown"}, secrets=secrets))
    assert ended.log_tail == ("$BASILICA_TOKEN|shown|$MASTER_ADDR|",)


# ---- results --------------------------------------------------------------------------------------------------------


def double(x: int) -> dict[str, int]:
    return {"rank": int(os.environ["RANK"]), "value": 2 * x}


async def test_what_a_shipped_function_returns_comes_back(machine: Machine) -> None:
    shipped = ship(double, args=(21,), python=sys.executable)
    async with machine.control_plane() as runtime:
        run = machine.run(Exec(tuple(shipped.argv)), env=shipped.env)
        assert await runtime.results(run) == {}
        await machine.launch(run, 0, 1)
        for rank in (0, 1):
            ended = await machine.until_ended(run, rank)
            assert ended.exit_code == 0, ended.log_tail
        texts = (await runtime.results(run)).items()
        results = {rank: json.loads(text) for rank, text in texts if isinstance(text, bytes)}
        assert results == {0: {"rank": 0, "value": 42}, 1: {"rank": 1, "value": 42}}
        await runtime.remove(run)
        assert await runtime.results(run) == {}


async def test_any_program_can_leave_a_result_and_a_new_attempt_begins_without(machine: Machine) -> None:
    once = 'test "$BASILICA_ATTEMPT" = 1 && echo \'{"a": 1}\' > "$BASILICA_RESULT_FILE"; true'
    async with machine.control_plane() as runtime:
        run = machine.run(sh(once))
        await machine.outcome(run)
        assert await runtime.results(run) == {0: b'{"a": 1}\n'}
        await machine.launch(run, attempt=2)
        await machine.until_ended(run, attempt=2)
        assert await runtime.results(run) == {}


async def test_a_result_that_is_too_large_is_named_and_hides_no_other(machine: Machine) -> None:
    program = sh(
        f'[ $RANK = 1 ] || head -c {RESULT_BYTES_MAX + 1} /dev/zero > "$BASILICA_RESULT_FILE"; '
        'echo 7 >> "$BASILICA_RESULT_FILE"'
    )
    async with machine.control_plane() as runtime:
        run = machine.run(program, world=WorldSize(2, 2, 2))
        await machine.launch(run, 0, 1)
        for rank in (0, 1):
            await machine.until_ended(run, rank)
        found = await runtime.results(run)
    assert found[1] == b"7\n"
    assert str(found[0]) == "the result of rank 0 has more than 8388608 bytes"


# ---- archives -------------------------------------------------------------------------------------------------------


async def in_pieces(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def used_by_nobody() -> set[tuple[str, str]]:
    return set()


@pytest.fixture
def project(tmp_path: Path) -> bytes:
    root = tmp_path / "project"
    (root / "lib").mkdir(parents=True)
    (root / "train.py").write_text("import os; print(os.listdir(), os.path.realpath('lib'))")
    (root / "lib" / "data").write_text("x" * 5_000_000)
    return pack(root)


async def test_ranks_run_in_what_was_sent(machine: Machine, project: bytes) -> None:
    async with machine.control_plane() as runtime:
        kept = await runtime.store_archive("ada", in_pieces(project))
        assert kept.bytes == len(project)
        path = machine.layout.archives / "ada" / f"{kept.digest}.tar.gz"
        assert (path.stat().st_mode & 0o777, path.read_bytes() == project) == (0o600, True)
        run = machine.run(python("import os; print(sorted(os.listdir()), os.getcwd())"), archive=kept.digest)
        below = machine.run(sh("ls"), name="below", archive=kept.digest, workdir="lib")
        workdir = machine.layout.workdir(run.instance)
        assert (await machine.outcome(run)).log_tail == (f"['lib', 'train.py'] {workdir}",)
        assert (await machine.outcome(below)).log_tail == ("data",)


async def test_an_archive_is_unpacked_once_per_run(machine: Machine, project: bytes) -> None:
    async with machine.control_plane() as runtime:
        kept = await runtime.store_archive("ada", in_pieces(project))
        run = machine.run(sh("ls mark; touch mark"), archive=kept.digest)
        await machine.outcome(run)
        await runtime.forget_archives(used_by_nobody, before=1e12)
        await machine.launch(run, attempt=2)
        assert (await machine.until_ended(run, attempt=2)).log_tail == ("mark",)
        ended = await machine.outcome(machine.run(sh("ls"), name="other", archive=kept.digest))
    assert (ended.exit_code, ended.reason) == (126, "StartError")
    assert ended.start_error is not None
    assert "is not there any more: deploy the run again" in ended.start_error


async def test_a_directory_that_the_disk_does_not_take_fails_the_rank_with_that_sentence(
    machine: Machine, project: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with machine.control_plane() as runtime:
        kept = await runtime.store_archive("ada", in_pieces(project))
        monkeypatch.setattr(tarfile.TarFile, "makefile", full)
        run = machine.run(sh("ls"), archive=kept.digest)
        ended = await machine.outcome(run)
        assert ended.start_error == f"cannot unpack the archive {kept.digest[:12]}: No space left on device"
        await runtime.remove(run)


async def test_a_rank_whose_directory_is_being_unpacked_says_so_and_can_be_stopped(
    machine: Machine, project: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others start meanwhile, also those of the same user and with an archive of their own once it is their turn; and
    what was abandoned leaves nothing behind."""
    began, real = threading.Event(), archives.harmless

    def slow(member: tarfile.TarInfo, place: Path) -> tarfile.TarInfo:
        began.set()
        while "stuck-x" in str(place) and not abandoned():
            time.sleep(0.01)
        return real(member, place)

    abandoned: Callable[[], bool] = archives.never
    real_unpack = archives.unpack

    def unpack(file: IO[bytes], target: Path, is_abandoned: Callable[[], bool]) -> None:
        nonlocal abandoned
        abandoned = is_abandoned
        real_unpack(file, target, is_abandoned)

    async with machine.control_plane() as runtime:
        kept = await runtime.store_archive("ada", in_pieces(project))
        monkeypatch.setattr(archives, "harmless", slow)
        monkeypatch.setattr("basilica.runtimes.local.archives.unpack", unpack)
        stuck = machine.run(sh("ls"), name="stuck", archive=kept.digest)
        await machine.launch(stuck)
        await asyncio.to_thread(began.wait)
        seen = await machine.seen(stuck)
        assert seen is not None
        assert (seen.sight, seen.note) == (Sight.QUEUED, "its directory is being unpacked")
        assert (await machine.outcome(machine.run(sh("exit 0"), name="other"))).exit_code == 0
        await machine.stop(stuck)
        assert (await machine.until_ended(stuck)).stopped
        await runtime.remove(stuck)
        assert not machine.layout.run(stuck.instance).exists()
        again = machine.run(sh("ls train.py"), name="again", archive=kept.digest)
        assert (await machine.outcome(again)).log_tail == ("train.py",)


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "../escape"},
        {"name": "/etc/passwd"},
        {"name": "link", "type": tarfile.SYMTYPE, "linkname": "../../secret"},
        {"name": "link", "type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        {"name": "hard", "type": tarfile.LNKTYPE, "linkname": "/etc/passwd"},
        {"name": "device", "type": tarfile.CHRTYPE},
        {"name": "pipe", "type": tarfile.FIFOTYPE},
    ],
    ids=str,
)
async def test_an_archive_that_reaches_out_is_refused_when_it_comes(machine: Machine, entry: dict[str, object]) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        info = tarfile.TarInfo()
        for field, value in entry.items():
            setattr(info, field, value)
        archive.addfile(info)
    async with machine.control_plane() as runtime:
        if entry["name"] == "/etc/passwd":  # that is unpacked as etc/passwd
            await runtime.store_archive("ada", in_pieces(packed.getvalue()))
            return
        with pytest.raises(ValidationError):
            await runtime.store_archive("ada", in_pieces(packed.getvalue()))
        assert list((machine.layout.archives / "ada").iterdir()) == []


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b"junk" * 100, lambda b: b[: len(b) // 2]])
async def test_what_is_no_archive_is_refused_and_leaves_nothing(
    machine: Machine, project: bytes, damage: Callable[[bytes], bytes]
) -> None:
    async with machine.control_plane() as runtime:
        with pytest.raises(ValidationError, match=r"archive: is no tar.gz"):
            await runtime.store_archive("ada", in_pieces(damage(project)))
        assert list((machine.layout.archives / "ada").iterdir()) == []


async def test_an_archive_that_would_fill_the_disk_is_refused(
    machine: Machine, project: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "UNPACKED_BYTES_MAX", 1000)
    async with machine.control_plane() as runtime:
        with pytest.raises(ValidationError, match="holds more than 1000 bytes"):
            await runtime.store_archive("ada", in_pieces(project))


async def test_an_upload_that_breaks_leaves_nothing(machine: Machine, project: bytes) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield project[:1000]
        raise ConnectionError

    async with machine.control_plane() as runtime:
        with pytest.raises((RuntimeUnavailable, ConnectionError)):
            await runtime.store_archive("ada", broken())
        assert list((machine.layout.archives / "ada").iterdir()) == []


async def test_only_old_archives_that_nobody_uses_are_forgotten(machine: Machine, project: bytes) -> None:
    async with machine.control_plane() as runtime:
        for user in ("ada", "bob", "eve"):
            await runtime.store_archive(user, in_pieces(project))
        digest = (await runtime.store_archive("ada", in_pieces(project))).digest
        for user in ("ada", "bob", "eve"):
            os.utime(machine.layout.archives / user / f"{digest}.tar.gz", (1, 1))
        assert await runtime.has_archive("eve", digest)  # which makes it young again
        assert not await runtime.has_archive("nobody", digest)

        async def in_use() -> set[tuple[str, str]]:
            return {("ada", digest)}

        assert await runtime.forget_archives(in_use, before=1000) == [digest]
        assert sorted(p.parent.name for p in machine.layout.archives.glob("*/*")) == ["ada", "eve"]


# ---- commands beside a rank -----------------------------------------------------------------------------------------


async def output(runtime: LocalRuntime, run: object, *argv: str, rank: int = 0) -> tuple[str, str, int]:
    found = {"stdout": "", "stderr": ""}
    async for chunk in runtime.execute(run, rank, argv):  # type: ignore[arg-type]
        match chunk:
            case Output(stream, text):
                found[stream] += text
            case Exited(code):
                return found["stdout"], found["stderr"], code
    raise AssertionError("it never ended")


async def test_a_command_has_the_environment_and_the_directory_of_the_rank(machine: Machine, tmp_path: Path) -> None:
    async with machine.control_plane(node="here") as runtime:
        run = machine.run(
            SLEEP, world=WorldSize(1, 2, 4), env={"MINE": "1"}, secrets={"TOKEN": "s"}, workdir=str(tmp_path)
        )
        await machine.launch(run, 0, 1)
        await machine.until_running(run, 1)
        script = "echo $RANK/$WORLD_SIZE $MINE $TOKEN $NODE_NAME; pwd; echo oh >&2; exit 3"
        assert await output(runtime, run, "sh", "-c", script, rank=1) == (f"1/2 1 s here\n{tmp_path}\n", "oh\n", 3)
        assert await output(runtime, run, "sh", "-c", "kill -9 $$") == ("", "", 137)
        missing = await output(runtime, run, "no-such-program-here")
        assert missing == ("", f"cannot execute no-such-program-here in {tmp_path}: No such file or directory\n", 127)
        await machine.stop(run, 0, 1)
        await machine.until_ended(run, 0)
        await machine.until_ended(run, 1)
        assert (await output(runtime, run, "echo", "after the end"))[0] == "after the end\n"


async def test_a_rank_that_was_never_launched_has_no_commands(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(SLEEP)
        for rank in (0, 1):
            with pytest.raises(Conflict, match=f"rank {rank} of train-x was never launched"):
                await output(runtime, run, "true", rank=rank)
            await machine.stop(run, 1)  # before it started: it never will


async def test_output_that_is_no_text_and_much_of_it_comes_whole(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(SLEEP)
        await machine.launch(run)
        await machine.until_running(run)
        out, err, code = await output(runtime, run, "sh", "-c", "printf '\\303\\274\\377'; head -c 3000000 /dev/zero")
        assert (out[:2], len(out), err, code) == ("ü\ufffd", 3000002, "", 0)
        await machine.stop(run)
        await machine.until_ended(run)


async def test_what_a_command_leaves_behind_is_ended_with_it(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(sh("exit 0"))
        await machine.outcome(run)
        out, _, code = await output(runtime, run, "sh", "-c", "setsid sleep 1000 & echo $!")
        assert code == 0
        await until_gone(int(out))


async def test_a_command_and_all_it_started_ends_when_nobody_reads_any_more(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(sh("exit 0"))
        await machine.outcome(run)
        reading = runtime.execute(run, 0, ["sh", "-c", "setsid sleep 1000 & echo $! $$; sleep 1000"])
        async for chunk in reading:
            if isinstance(chunk, Output) and chunk.text:
                pids = [int(pid) for pid in chunk.text.split()]
                break
        await reading.aclose()
        for pid in pids:
            await until_gone(pid)


async def test_a_command_that_is_cancelled_while_it_is_silent_ends(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(sh("exit 0"))
        await machine.outcome(run)
        fifo = machine.state_dir / "fifo"
        os.mkfifo(fifo)
        reading = asyncio.create_task(output(runtime, run, "sh", "-c", f"echo $$ > {fifo}; exec sleep 1000"))
        pid = int(await asyncio.to_thread(fifo.read_text))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until_gone(pid)
