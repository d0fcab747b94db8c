"""A keyspace whose files are not what they were: it begins anew, says so, and is nobody else's problem."""

import errno
import json
import os
import shutil
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from basilica.rendezvous import journal
from basilica.rendezvous.journal import Journal, JournalDamaged
from basilica.rendezvous.keyspace import Keyspace, Request
from basilica.rendezvous.retries import opened
from basilica.rendezvous.service import Service


def line(record: object) -> bytes:
    text = json.dumps(record).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").touch()


def a_link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # its name must be short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def holding(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


INSTEAD = {
    "a fifo": a_fifo,
    "a directory": a_directory,
    "a link to zeros": a_link_to_zeros,
    "a link to nowhere": a_link_to_nowhere,
    "a socket": a_socket,
    "garbage": holding(os.urandom(64) + b"\n" + os.urandom(64) + b"\n"),
    "a list": holding(line([1, 2]) + line([])),
    "numbers": holding(b"7\n7\n"),
    "deep": holding(b"[" * 3000 + b"\n{}\n"),
    "the future": holding(line({"n": 5, "at": 0, "do": {"method": "PUT", "path": "/a", "colour": "blue"}}) + b"x\n"),
    "other types": holding(line({"n": 5, "at": "noon", "do": {"method": "PUT", "path": 7}}) + b"x\n"),
    "a gap": holding(line({"n": 500, "at": 0}) + line({"n": 501, "at": 0})),
}


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Service]:
    service = Service(folder)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


def is_there(path: Path) -> bool:
    return os.path.lexists(path)


async def put(port: int, value: str) -> None:
    async with opened(f"127.0.0.1:{port}") as keys:
        assert (await keys.put("/a", value)).status == 201


async def get(port: int) -> str | None:
    async with opened(f"127.0.0.1:{port}") as keys:
        return (await keys.get("/a")).node.get("value")


@pytest.mark.parametrize("file", ["about", "snapshot", "journal", "."])
@pytest.mark.parametrize("what", INSTEAD)
async def test_whatever_stands_in_place_of_a_file_costs_one_keyspace_its_keys_and_nobody_else_anything(
    tmp_path: Path, file: str, what: str
) -> None:
    async with serving(tmp_path) as service:
        ports = {name: await service.open(name) for name in ("bad", "good")}
        for port in ports.values():
            await put(port, "1")
    path = tmp_path / "keyspaces" / "bad" / file
    if file == ".":
        path = tmp_path / "keyspaces" / "bad"
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    INSTEAD[what](path)
    async with serving(tmp_path) as service:
        rows = {row["name"]: row for row in service.list()}
        assert rows["good"] == {"name": "good", "port": ports["good"], "serving": True, "fault": None}
        assert await get(ports["good"]) == "1"
        assert await service.open("bad", ports["bad"]) == ports["bad"]
        fault = {row["name"]: row for row in service.list()}["bad"]["fault"]
        if file == "." and what == "a directory":  # which has nothing in it that could have been a keyspace
            assert fault is None
        else:
            assert "the keys of bad were lost" in fault
            assert is_there(tmp_path / "damaged" / "bad")
        assert await get(ports["bad"]) is None
        await put(ports["bad"], "2")
    async with serving(tmp_path) as service:  # it is whole again, and stays so
        assert [row["fault"] for row in service.list()] == [None, None]
        assert await get(ports["bad"]) == "2"
        assert await service.close("bad")
        assert not is_there(tmp_path / "damaged" / "bad")


@pytest.mark.parametrize("name", ["lock", "control.sock", "keyspaces"])
@pytest.mark.parametrize("what", ["a fifo", "a directory", "a link to nowhere", "a socket"])
async def test_the_service_comes_back_whatever_stands_in_its_own_places(tmp_path: Path, name: str, what: str) -> None:
    if (name, what) != ("keyspaces", "a directory"):
        INSTEAD[what](tmp_path / name)
    async with serving(tmp_path) as service:
        await put(await service.open("run"), "1")


async def test_a_shortage_of_the_machine_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as service:
        port = await service.open("run")
        await put(port, "1")

    def no_more(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as short:
        short.setattr(journal, "open_regular", no_more)
        service = Service(tmp_path)
        with pytest.raises(JournalDamaged):
            await service.start()
        await service.stop()
    async with serving(tmp_path) as service:
        assert await get(port) == "1"


async def test_two_keyspaces_that_name_one_port_do_not_share_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        ports = [await service.open(name) for name in ("a", "b")]
    about = {"name": "b", "port": ports[0]}
    (tmp_path / "keyspaces" / "b" / "about").write_text(json.dumps(about))
    async with serving(tmp_path) as service:
        assert await service.open("b", ports[1]) == ports[1]
        assert [row["port"] for row in service.list()] == ports


async def test_a_keyspace_whose_folder_is_taken_away_can_still_be_closed(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.open("run")
        shutil.rmtree(tmp_path / "keyspaces" / "run")
        assert await service.close("run")
        a_fifo(tmp_path / "keyspaces" / "run")
        await service.open("run")
        assert await service.close("run")


async def test_what_was_written_while_a_snapshot_was_is_kept(tmp_path: Path) -> None:
    kept = Journal(tmp_path, compact_bytes=1)

    def write(value: str) -> None:
        request = Request(method="PUT", path=f"/{value}", value=value)
        kept.record(request, 1)
        kept.keyspace.write(request, 1)

    for number in range(3):
        write(str(number))
    begun = kept.begin_compaction()
    assert begun is not None
    write("meanwhile")
    size = begun.write()
    write("too")
    kept.finish_compaction(begun, size)
    write("after")
    before = kept.keyspace.dump()
    kept.close()
    assert (tmp_path / "journal").read_bytes().count(b"\n") == 3
    again = Journal(tmp_path)
    assert again.keyspace.dump() == before
    again.close()


async def test_a_snapshot_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    keyspace = Keyspace()
    for number in range(3):
        keyspace.write(Request(method="PUT", path=f"/a/{number}", value="x"), 1)
    state = {key: value for key, value in keyspace.dump().items() if key != "cleared"}
    (tmp_path / "snapshot").write_bytes(line(state))
    kept = Journal(tmp_path)
    assert kept.keyspace.dump() == keyspace.dump()
    kept.close()
