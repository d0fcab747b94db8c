"""Output is kept, bounded, and read from either end without missing or repeating a line."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from basilica.core.errors import ValidationError
from basilica.machine.layout import Key
from basilica.ports import LogChunk, Run
from basilica.runtimes.local.logs import BLOCK, LINE_MAX, Cursor, Tail, find_tail, read_on, read_tail
from tests.runtime_local.machine import PATIENCE_S, Machine, python, sh


async def test_the_tail_goes_back_over_all_attempts(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(sh("seq -f $BASILICA_ATTEMPT-%.0f 3; printf $BASILICA_ATTEMPT-end; exit 1"))
        for attempt in (1, 2):
            await machine.launch(run, attempt=attempt)
            await machine.until_ended(run, attempt=attempt)
        assert (await runtime.tail(run, 0, 2)).lines == ("2-3", "2-end")
        assert (await runtime.tail(run, 0, 6)).lines == ("1-3", "1-end", "2-1", "2-2", "2-3", "2-end")
        whole = await runtime.tail(run, 0, None)
        assert len(whole.lines) == 8
        assert (await runtime.tail(run, 0, 0)) == LogChunk(0, (), whole.cursor)
        assert await _next(machine, run, whole.cursor) == ()
        assert (await runtime.tail(run, 7, None)) == LogChunk(7, (), "0:0")


async def test_follow_goes_on_to_the_next_attempt_and_resumes_at_its_cursor(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(sh("echo $BASILICA_ATTEMPT-a; echo $BASILICA_ATTEMPT-b; exit 1"))
        lines: list[str] = []
        cursors: list[str] = []

        async def reader() -> None:
            async for chunk in runtime.follow(run, 0, None):
                lines.extend(chunk.lines)
                cursors.append(chunk.cursor)
                if lines[-1:] == ["2-b"]:
                    return

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            group.create_task(reader())
            for attempt in (1, 2):
                await machine.launch(run, attempt=attempt)
                await machine.until_ended(run, attempt=attempt)
        assert lines == ["1-a", "1-b", "2-a", "2-b"]
        for cursor in cursors:
            rest = [*await _next(machine, run, cursor)]
            assert rest == lines[len(lines) - len(rest) :]


async def test_follow_brings_lines_as_they_are_written_and_whole(machine: Machine) -> None:
    script = "echo one; printf tw; read x < $BASILICA_CHECKPOINT_DIR/gate; echo o; printf three; exit 0"
    async with machine.control_plane() as runtime:
        run = machine.run(sh(script))
        gate = machine.layout.checkpoints(run.instance) / "gate"
        gate.parent.mkdir(parents=True)
        os.mkfifo(gate)
        await machine.launch(run)
        got: list[tuple[str, ...]] = []
        opened = False
        async with asyncio.timeout(PATIENCE_S):
            async for chunk in runtime.follow(run, 0, None):
                got.append(chunk.lines)
                if ("one",) in got and not opened:
                    opened = True
                    await asyncio.to_thread(gate.write_text, "\n")
                if any("three" in lines for lines in got) and not chunk.lines:
                    break
    assert [line for lines in got for line in lines] == ["one", "two", "three"]


async def test_old_output_is_freed_and_offsets_stay(machine: Machine) -> None:
    limit = 1 << 20
    script = (
        "import sys, time\n"
        "for n in range(6):\n"
        "    sys.stdout.write(''.join(f'{n}-{i:08d}-' + 'x' * 85 + '\\n' for i in range(10_000)))\n"
        "    sys.stdout.flush(); time.sleep(0.4)\n"
        "print('end', flush=True); sys.stdin.read(); time.sleep(1000)"
    )
    async with machine.control_plane(log_limit_bytes=limit) as runtime:
        run = machine.run(python(script))
        await machine.launch(run)
        seen: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            async for chunk in runtime.follow(run, 0, None):
                seen += chunk.lines
                if seen[-1:] == ["end"]:
                    break
        log = machine.layout.log(Key(run.instance, 0, 1))
        async with asyncio.timeout(PATIENCE_S):
            while os.stat(log).st_blocks * 512 > 2 * limit:
                await asyncio.sleep(0.02)  # the supervisor looks once a second while output comes
        assert os.stat(log).st_size > 5 * limit
        assert len(seen) == 60_001  # a reader who keeps up misses nothing
        first, kept = (await _next(machine, run, "1:0"), (await runtime.tail(run, 0, None)).lines)
        while first != kept[: len(first)]:  # more was freed between the two
            first, kept = (await _next(machine, run, "1:0"), (await runtime.tail(run, 0, None)).lines)
        assert limit // 100 - 100 < len(kept) < 2 * limit // 100
        assert list(kept) == seen[-len(kept) :]  # and the first line that is kept is a whole one
        assert (await runtime.tail(run, 0, 2)).lines == (seen[-2], "end")
        await machine.stop(run)
        await machine.until_ended(run)


async def test_output_comes_through_a_restart_of_the_control_plane(machine: Machine) -> None:
    run = machine.run(sh("echo before; read x < $BASILICA_CHECKPOINT_DIR/gate; echo after"))
    gate = machine.layout.checkpoints(run.instance) / "gate"
    gate.parent.mkdir(parents=True)
    os.mkfifo(gate)
    async with machine.control_plane() as runtime:
        await machine.launch(run)
        await machine.until_printed(run, "before")
        cursor = (await runtime.tail(run, 0, None)).cursor
    gate.write_text("\n")
    async with machine.control_plane():
        await machine.until_ended(run)
        assert await _next(machine, run, cursor) == ("after",)


async def test_a_rank_that_empties_its_own_log_is_read_on(machine: Machine) -> None:
    async with machine.control_plane():
        run = machine.run(sh("seq 1000; echo short > /dev/stdout"))
        await machine.outcome(run)
        assert await _next(machine, run, "1:3000") == ("short",)


@pytest.mark.parametrize("cursor", ["", "1", "1:", ":1", "1:x", "-1:0", "1:-1", "1:0:0", "٣:0", "9" * 80 + ":0"])
async def test_a_cursor_that_nobody_gave_out_is_refused(machine: Machine, cursor: str) -> None:
    async with machine.control_plane() as runtime:
        with pytest.raises(ValidationError):
            await anext(runtime.follow(machine.run(sh("exit 0")), 0, cursor))


def test_an_overlong_line_comes_in_pieces_that_divide_no_character(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = "é" * LINE_MAX
    log.write_text(f"{text}\nnext\n", encoding="utf-8")
    pieces: list[str] = []
    offset = 0
    while (lines := read_on(str(log), offset, ended=True)).lines:
        pieces += lines.lines
        offset = lines.offset
    assert pieces.pop() == "next"
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= LINE_MAX
    assert read_tail(str(log), 1, ended=True).lines == ("next",)


def test_bytes_that_are_no_text_are_shown_as_such(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"a\xffb\r\n\n\xe2\x82")
    assert read_tail(str(log), 9, ended=True).lines == ("a\ufffdb", "", "\ufffd")
    assert read_on(str(log), 0, ended=False).lines == ("a\ufffdb", "")


def test_the_tail_of_a_large_file_reads_little_of_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # a hole of a terabyte: whoever reads it all does not come back
        file.seek(0, os.SEEK_END)
        file.write(b"".join(b"line %d\n" % n for n in range(200_000)))
    tail = read_tail(str(log), 3, ended=True)
    assert tail.lines == ("line 199997", "line 199998", "line 199999")
    assert tail.offset == log.stat().st_size
    assert len(read_tail(str(log), 1 << 62, ended=True).lines) in (199_999, 200_000)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
@pytest.mark.parametrize("content", [b"", b"\n", b"a", b"a\n", b"a\nb", b"a\nb\n", b"\n\na\n\n"])
@pytest.mark.parametrize("ended", [False, True])
def test_the_tail_is_the_end_of_what_reading_on_gives(tmp_path: Path, content: bytes, count: int, ended: bool) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    whole = read_on(str(log), 0, ended=ended)
    tail = read_tail(str(log), count, ended=ended)
    assert tail.offset == whole.offset
    assert tail.lines == (whole.lines[-count:] if count else ())


def test_cursors_are_ordered_and_written_as_they_are_read() -> None:
    assert str(Cursor.parse("3:14")) == "3:14"
    assert Cursor(1, 99) < Cursor(2, 0)


async def _next(machine: Machine, run: Run, cursor: str) -> tuple[str, ...]:
    """What there is from the cursor on, up to the point where all has been read."""
    lines: tuple[str, ...] = ()
    async with asyncio.timeout(PATIENCE_S):
        async for chunk in machine.runtime.follow(run, 0, cursor):
            if not chunk.lines:
                break
            lines += chunk.lines
    return lines


@pytest.mark.parametrize(
    ("text", "lines", "ended", "found"),
    [
        (b"", 5, True, Tail(0, 0)),
        (b"a\nb\nc\n", 0, True, Tail(6, 0)),
        (b"a\nb\nc\n", 1, True, Tail(4, 1)),
        (b"a\nb\nc\n", 3, False, Tail(0, 3)),
        (b"a\nb\nc\n", 9, False, Tail(0, 3)),
        (b"a\nb\nc", 0, True, Tail(5, 0)),
        (b"a\nb\nc", 1, True, Tail(4, 1)),
        (b"a\nb\nc", 2, True, Tail(2, 2)),
        (b"a\nb\nc", 0, False, Tail(4, 0)),  # the last line is still being written
        (b"a\nb\nc", 1, False, Tail(2, 1)),
        (b"abc", 3, False, Tail(0, 0)),
        (b"\n\n\n", 2, True, Tail(1, 2)),
        (b"x" * BLOCK + b"\n" + b"y" * BLOCK + b"\n", 1, True, Tail(BLOCK + 1, 1)),
        (b"x\n" * BLOCK, BLOCK - 1, True, Tail(2, BLOCK - 1)),
        (b"x\n" * BLOCK, BLOCK, True, Tail(0, BLOCK)),
    ],
)
def test_the_place_of_the_last_lines(tmp_path: Path, text: bytes, lines: int, ended: bool, found: Tail) -> None:
    log = tmp_path / "log"
    log.write_bytes(text)
    assert find_tail(str(log), lines, ended=ended) == found


async def test_the_cursor_of_the_tail_goes_back_over_all_attempts(machine: Machine) -> None:
    async with machine.control_plane() as runtime:
        run = machine.run(sh("seq -f $BASILICA_ATTEMPT-%.0f 3; printf $BASILICA_ATTEMPT-end; exit 1"))
        for attempt in (1, 2):
            await machine.launch(run, attempt=attempt)
            await machine.until_ended(run, attempt=attempt)
        for lines in (0, 2, 4, 6, 8, 100):
            wanted = (await runtime.tail(run, 0, lines)).lines
            found: list[str] = []
            async with contextlib.aclosing(runtime.follow(run, 0, await runtime.tail_cursor(run, 0, lines))) as chunks:
                async for chunk in chunks:
                    if not chunk.lines:
                        break
                    found += chunk.lines
            assert tuple(found) == wanted
        assert await runtime.tail_cursor(run, 7, 3) == "0:0"
