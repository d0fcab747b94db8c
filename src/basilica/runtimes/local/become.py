"""Become another user and execute a command: `python -I -S become.py UID GID COMMAND...`.

No import may follow the change of user: a user who cannot read this interpreter's library may still run programs.
"""

import os
import sys


def places(program: str) -> list[str]:
    """Return the possible paths of the program, in the order of PATH."""
    if "/" in program:
        return [program]
    path = os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")
    return [os.path.join(directory or ".", program) for directory in path.split(":")]


def main(uid: int, gid: int, argv: list[str]) -> int:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    code, problem = 127, "No such file or directory"
    for place in places(argv[0]):
        try:
            os.execve(place, argv, os.environ)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if not os.path.exists(place):  # this user may not search the directory
                continue
            code, problem = 126, error.strerror or str(error)
    print(f"cannot execute {argv[0]}: {problem}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
