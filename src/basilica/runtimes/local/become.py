"""Become another user and execute a command: `python -I -S become.py UID GID COMMAND...`. Standard library only."""

import os
import sys


def main(uid: int, gid: int, argv: list[str]) -> int:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        print(f"cannot execute {argv[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
