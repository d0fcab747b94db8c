"""The work directory of a rank in a pod: its archive is joined, compared with its digest and unpacked.

The agent does this before the first attempt. Later attempts find the directory as the last attempt left it.

    BASILICA_ARCHIVE            the SHA-256 of the archive; without it no directory was sent
    BASILICA_ARCHIVE_PARTS      the number of its parts
    BASILICA_ARCHIVE_SENT       the directory of the parts, which are named by their numbers
    BASILICA_ARCHIVE_UNPACKED   the directory to unpack it to
    BASILICA_ARCHIVE_WORKDIR    the directory in it that the rank runs in
"""

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path

from basilica.core import environment as env
from basilica.rank.log import log
from basilica.shipping.unpack import BrokenArchive, unpack

NAMES = (env.ARCHIVE, env.ARCHIVE_PARTS, env.ARCHIVE_SENT, env.ARCHIVE_UNPACKED, env.ARCHIVE_WORKDIR)
SEND_AGAIN = "deploy the run again from its directory"


class Undeliverable(Exception):
    """The rank has no directory to run in; the text names the reason and the next step."""


def deliver(environment: Mapping[str, str]) -> Path | None:
    """Unpack the archive, once, and return the directory to run in; None if no archive was sent."""
    digest = environment.get(env.ARCHIVE, "")
    if not _is_sent(environment):
        return None
    target = Path(environment[env.ARCHIVE_UNPACKED])
    if not target.is_dir():
        content = _joined(environment, digest)
        try:
            unpack(io.BytesIO(content), target)
        except BrokenArchive as error:
            raise Undeliverable(f"the archive {digest[:12]} cannot be unpacked: {error}") from error
        except OSError as error:
            raise Undeliverable(
                f"cannot unpack the archive {digest[:12]} into {target}: {error.strerror or error}"
            ) from error
    place = target / environment.get(env.ARCHIVE_WORKDIR, "")
    if not place.is_dir():
        raise Undeliverable(f"there is no directory {place.relative_to(target)} in what was sent")
    return place


def _joined(environment: Mapping[str, str], digest: str) -> bytes:
    sent, parts = Path(environment[env.ARCHIVE_SENT]), int(environment[env.ARCHIVE_PARTS])
    if parts == 0:
        raise Undeliverable(f"the archive {digest[:12]} is not on the cluster (any more): {SEND_AGAIN}")
    content = bytearray()
    for number in range(parts):
        try:
            content += (sent / f"{number:04d}").read_bytes()
        except OSError as error:
            raise Undeliverable(
                f"part {number + 1} of {parts} of the archive {digest[:12]} is missing: {SEND_AGAIN}"
            ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise Undeliverable(
            f"what came is not the archive {digest[:12]} but {found[:12]}: somebody has changed its ConfigMaps, "
            f"basilica-archive-{digest[:32]}…; delete them, and {SEND_AGAIN}"
        )
    return bytes(content)


def without_delivery(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of the archive, as ranks of other runtimes have it."""
    ours = set(NAMES) if _is_sent(environment) else set()
    return {name: value for name, value in environment.items() if name not in ours}


def _is_sent(environment: Mapping[str, str]) -> bool:
    """Whether all variables of the archive are there: one of them may also be the user's own."""
    return all(name in environment for name in NAMES)


def make_checkpoint_directory(environment: Mapping[str, str]) -> None:
    """Make the run's directory in a volume that runs share; one that cannot be made is logged."""
    directory = environment.get(env.CHECKPOINT_DIR)
    try:
        if directory:
            os.makedirs(directory, exist_ok=True)
    except OSError as error:
        log(f"cannot make {directory}: {error.strerror}; the program has to do without")
