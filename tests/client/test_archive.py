"""A directory as it travels: what of it, in which form, and how large."""

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from basilica.core.errors import ValidationError
from basilica.shipping import pack as archive
from basilica.shipping.pack import pack

FILES = {
    ".gitignore": "*.log\n/build/\n!keep.log\ndata/**/raw\n# no\n\\#hash\nnotes?.txt\n[xy].bin\ntemp/\nspace\\ \n",
    "train.py": "print(1)",
    "a.log": "",
    "keep.log": "kept",
    "build/out.o": "",
    "src/build/kept.o": "",
    "src/.gitignore": "!a.log\n/only_here\nb/*\n!b/wanted\n",
    "src/a.log": "kept",
    "src/deep/a.log": "kept",
    "src/only_here": "",
    "src/deep/only_here": "kept",
    "src/b/unwanted": "",
    "src/b/wanted": "kept",
    "data/raw": "",
    "data/x/y/raw": "",
    "data/x/raw.csv": "kept",
    "#hash": "",
    "notes1.txt": "",
    "notes10.txt": "kept",
    "x.bin": "",
    "z.bin": "kept",
    "temp/a": "",
    "other/temp": "a file, so kept",
    "other/.git/config": "",
    "space ": "",
    "ü ñ": "kept",
}
KEPT = [
    ".gitignore", "data/x/raw.csv", "keep.log", "notes10.txt", "other/temp", "src/.gitignore", "src/a.log",
    "src/b/wanted", "src/build/kept.o", "src/deep/a.log", "src/deep/only_here", "train.py", "z.bin", "ü ñ",
]  # fmt: skip


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def opened(packed: bytes) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz")


def names(packed: bytes) -> list[str]:
    with opened(packed) as found:
        return found.getnames()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    return root


def with_git(root: Path) -> None:
    subprocess.run(["git", "init", "-q", str(root)], check=True)


def without_git(root: Path) -> None:
    pass


@pytest.mark.parametrize("prepare", [with_git, without_git])
def test_what_gitignore_leaves_out_stays_here(root: Path, prepare: Callable[[Path], None]) -> None:
    files = dict(FILES)
    if prepare is with_git:
        if shutil.which("git") is None:
            pytest.skip("no git here")
        del files["other/.git/config"]  # git would take that for a repository
    write(root, files)
    prepare(root)
    assert names(pack(root)) == sorted(KEPT)


def test_a_directory_within_a_work_tree_obeys_the_rules_above_it(root: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git here")
    with_git(root)
    write(root, {".gitignore": "*.log\n", "sub/a.log": "", "sub/b.py": "", "c.py": ""})
    subprocess.run(["git", "-C", str(root), "add", "-A"], check=True)
    (root / "sub" / "new.py").touch()
    (root / "sub" / "gone.py").touch()
    subprocess.run(["git", "-C", str(root), "add", "-A"], check=True)
    (root / "sub" / "gone.py").unlink()
    assert names(pack(root / "sub")) == ["b.py", "new.py"]


def test_a_repository_in_the_repository_comes_too(root: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git here")
    with_git(root)
    write(root, {"a.py": "", "lib/.gitignore": "*.o\n", "lib/b.py": "", "lib/c.o": ""})
    with_git(root / "lib")
    assert names(pack(root)) == ["a.py", "lib/.gitignore", "lib/b.py"]


def test_equal_directories_give_equal_bytes(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for place, order in ((root, list(FILES)), (other, list(reversed(FILES)))):
        write(place, {name: FILES[name] for name in order if "/.git/" not in name})
    os.utime(root / "train.py", (1, 1))
    (root / "train.py").chmod(0o600)
    assert pack(root) == pack(other)


def test_contents_and_executable_bits_arrive(root: Path, tmp_path: Path) -> None:
    write(root, {"run.sh": "#!/bin/sh\n", "a/b": "text"})
    (root / "run.sh").chmod(0o700)
    with opened(pack(root)) as found:
        found.extractall(tmp_path / "there", filter="data")
    assert (tmp_path / "there" / "a" / "b").read_text() == "text"
    assert os.access(tmp_path / "there" / "run.sh", os.X_OK)
    assert not os.access(tmp_path / "there" / "a" / "b", os.X_OK)
    assert (tmp_path / "there" / "a" / "b").stat().st_mtime >= 315_532_800


def test_links_are_kept_where_they_lead_to_something_inside(root: Path) -> None:
    write(root, {"a/real": "x"})
    (root / "a" / "near").symlink_to("real")
    (root / "up").symlink_to("a/../a/real")
    (root / "absolute").symlink_to(root / "a")
    (root / "a" / "out").symlink_to("../../secret")
    (root / "etc").symlink_to("/etc")
    with opened(pack(root)) as found:
        links = {m.name: m.linkname for m in found if m.issym()}
    assert links == {"a/near": "real", "up": "a/real", "absolute": "a"}


def test_what_is_no_file_stays_here(root: Path) -> None:
    os.mkfifo(root / "pipe")
    write(root, {"a": ""})
    assert names(pack(root)) == ["a"]


def test_too_much_is_refused_with_the_largest_entries(root: Path) -> None:
    write(root, {"small": "x", "a/large": "x" * 2_000_000, "b": "x" * 1_000_000, "c": "x" * 1_500_000, "d": "xx"})
    with pytest.raises(ValidationError) as refused:
        pack(root, limit=4_000_000)
    assert refused.value.field == "workdir"
    assert refused.value.problem == (
        "holds 4.5 MB, and at most 4.0 MB travel; the largest: a/large (2.0 MB), c (1.5 MB), b (1.0 MB). "
        "Leave out what the ranks do not need with .gitignore"
    )


def test_progress_is_told_in_bytes(root: Path) -> None:
    write(root, {"a": "x" * 10, "b": "x" * 5})
    told: list[tuple[int, int]] = []
    pack(root, lambda done, total: told.append((done, total)))
    assert told == [(10, 15), (15, 15)]


def test_what_is_no_directory_is_refused(root: Path) -> None:
    write(root, {"a": ""})
    for place in (root / "a", root / "nowhere"):
        with pytest.raises(ValidationError, match="is not a directory"):
            pack(place)


def test_an_empty_directory_is_an_empty_archive(root: Path) -> None:
    assert names(pack(root)) == []


def test_our_own_rules_agree_with_git(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git here")
    write(root, {name: text for name, text in FILES.items() if "/.git/" not in name})
    with_git(root)
    by_git = names(pack(root))
    monkeypatch.setattr(archive, "_names_by_git", lambda _: None)
    assert names(pack(root)) == by_git
