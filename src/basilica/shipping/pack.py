"""The tar.gz of a directory: the files that git would track, always the same bytes for the same contents."""

import gzip
import io
import os
import re
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from basilica.core.errors import ValidationError

UNPACKED_BYTES_MAX = 256_000_000
LARGEST_SHOWN = 3
MOMENT = 315_532_800  # 1980: files older than that cannot be put into a zip, and so into a wheel
GIT_SECONDS = 60.0

Progress = Callable[[int, int], None]


def pack(directory: str | Path, progress: Progress | None = None, *, limit: int = UNPACKED_BYTES_MAX) -> bytes:
    """Pack the directory without `.git` and without the files that `.gitignore` excludes.

    Symbolic links are kept if their target is inside. `progress` gets the bytes done and the bytes in all.
    """
    root = Path(directory)
    if not root.is_dir():
        raise ValidationError("workdir", str(directory), "is not a directory")
    entries = sorted(_entries(root), key=lambda entry: entry.name)
    total = sum(entry.size for entry in entries)
    if total > limit:
        raise ValidationError("workdir", str(directory), _too_large(entries, total, limit))
    packed = io.BytesIO()
    done = 0
    with (
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=packed, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for entry in entries:
            _add(archive, root, entry)
            done += entry.size
            if progress is not None:
                progress(done, total)
    return packed.getvalue()


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file, or with `target` a symbolic link; `name` is relative to the directory."""

    name: str
    size: int = 0
    executable: bool = False
    target: str | None = None


def _add(archive: tarfile.TarFile, root: Path, entry: _Entry) -> None:
    info = tarfile.TarInfo(entry.name)
    info.mtime = MOMENT
    info.mode = 0o755 if entry.executable else 0o644
    if entry.target is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.target
        archive.addfile(info)
        return
    info.size = entry.size
    try:
        with (root / entry.name).open("rb") as file:
            archive.addfile(info, file)
    except OSError as error:
        raise ValidationError("workdir", entry.name, f"cannot be read: {error.strerror or error}") from error


def _too_large(entries: Iterable[_Entry], total: int, limit: int) -> str:
    largest = sorted(entries, key=lambda entry: -entry.size)[:LARGEST_SHOWN]
    shown = ", ".join(f"{entry.name} ({_megabytes(entry.size)})" for entry in largest)
    return (
        f"holds {_megabytes(total)}, and at most {_megabytes(limit)} travel; the largest: {shown}. "
        "Leave out what the ranks do not need with .gitignore"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 10_000_000 else f"{size / 1e6:.1f} MB"


# ---- contents -------------------------------------------------------------------------------------------------------


def _entries(root: Path) -> Iterator[_Entry]:
    for name in _names(root):
        path = root / name
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue  # deleted, but still in git's index
        if stat.S_ISLNK(found.st_mode):
            target = _target_inside(root, path)
            if target is not None:
                yield _Entry(name, target=target)
        elif stat.S_ISREG(found.st_mode):
            yield _Entry(name, found.st_size, bool(found.st_mode & stat.S_IXUSR))
        elif stat.S_ISDIR(found.st_mode):  # a repository in the repository, which git names but does not list
            for inner in _entries(path):
                yield _Entry(f"{name.rstrip('/')}/{inner.name}", inner.size, inner.executable, inner.target)


def _target_inside(root: Path, link: Path) -> str | None:
    """Return the target of the link, relative to it; None if the target is outside."""
    place = Path(os.path.realpath(link.parent))
    target = Path(os.path.normpath(place / os.readlink(link)))
    if not target.is_relative_to(os.path.realpath(root)):
        return None
    return os.path.relpath(target, place)


def _names(root: Path) -> Iterator[str]:
    known = _names_by_git(root)
    names = _walk(root, "", ()) if known is None else known
    return (name for name in names if ".git" not in name.split("/"))


def _names_by_git(root: Path) -> list[str] | None:
    """Return the files that git tracks or would track; None without git, or outside a work tree of its own."""
    try:
        top = _git(root, "rev-parse", "--is-inside-work-tree")
        listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z") if top == "true\n" else None
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return None if listed is None else sorted({name for name in listed.split("\0") if name})


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, check=True, timeout=GIT_SECONDS, text=True
    )
    return done.stdout


# ---- without git ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rule:
    """One line of a .gitignore, for paths relative to the directory that is shipped."""

    pattern: re.Pattern[str]
    ignore: bool
    directories_only: bool


def _walk(root: Path, below: str, rules: tuple[_Rule, ...]) -> Iterator[str]:
    try:
        lines = (root / below / ".gitignore").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    rules += tuple(rule for line in lines if (rule := _rule(line, below)) is not None)
    for entry in sorted(os.scandir(root / below), key=lambda entry: entry.name):
        name = f"{below}/{entry.name}" if below else entry.name
        is_directory = entry.is_dir(follow_symlinks=False)
        if entry.name == ".git" or ignored(name, is_directory, rules):
            continue
        if is_directory:
            yield from _walk(root, name, rules)
        else:
            yield name


def ignored(name: str, is_directory: bool, rules: Iterable[_Rule]) -> bool:
    """Return whether the rules exclude the name; the last rule that matches decides."""
    verdict = False
    for rule in rules:
        if (is_directory or not rule.directories_only) and rule.pattern.fullmatch(name):
            verdict = rule.ignore
    return verdict


def _rule(line: str, below: str) -> _Rule | None:
    line = re.sub(r"(?<!\\)\s+$", "", line)
    if not line or line.startswith("#"):
        return None
    ignore = not line.startswith("!")
    line = line.removeprefix("!") if not ignore else line
    directories_only = line.endswith("/")
    line = line.rstrip("/")
    anchored = "/" in line
    prefix = re.escape(f"{below}/") if below else ""
    pattern = prefix + ("" if anchored else "(?:.*/)?") + _regex(line.removeprefix("/"))
    try:
        return _Rule(re.compile(pattern, re.DOTALL), ignore, directories_only)
    except re.error:
        return None  # git ignores a line that it does not understand, too


def _regex(glob: str) -> str:
    out, at = "", 0
    while at < len(glob):
        rest = glob[at:]
        if rest.startswith("**/") and (at == 0 or glob[at - 1] == "/"):
            out, at = out + "(?:.*/)?", at + 3
        elif rest == "**" and (at == 0 or glob[at - 1] == "/"):
            out, at = out + ".+", at + 2
        elif rest[0] == "*":
            stars = len(rest) - len(rest.lstrip("*"))
            out, at = out + "[^/]*", at + stars
        elif rest[0] == "?":
            out, at = out + "[^/]", at + 1
        elif rest[0] == "[" and (end := rest.find("]", 2)) > 0:
            inside = rest[1:end].replace("\\", "\\\\")
            inside = f"^{inside[1:]}" if inside[0] in "!^" else inside
            out, at = out + f"[{inside}]", at + end + 1
        elif rest[0] == "\\" and len(rest) > 1:
            out, at = out + re.escape(rest[1]), at + 2
        else:
            out, at = out + re.escape(rest[0]), at + 1
    return out
