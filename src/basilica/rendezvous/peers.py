"""The user of the process at the other end of a connection from this machine.

The kernel knows the user that made a socket. It is asked for the one socket whose two addresses are those of the
connection (`sock_diag(7)`), which costs the same however many sockets there are; where that is not built in, the tables
in /proc are read. A socket that its process has closed already belongs to nobody, although the kernel then answers 0.
"""

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLMSG_ERROR, NLM_F_REQUEST = 4, 20, 2, 1
HEADER = struct.Struct("=IHHII")
QUESTION = struct.Struct("=BBBBI")
COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, any cookie
FOUND_AT = HEADER.size + 4 + 48 + 12  # the answer begins with four bytes, the addresses, and three numbers
ANSWER_BYTES = 4096
ANSWER_WITHIN_S = 1.0

Address = tuple[str, int]

_kernel_answers = False  # it has found a connection before, so that "not found" can be trusted


class UnknownPeer(Exception):
    """The user of a connection cannot be determined."""


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine, in the same network namespace, can reach the address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def uid_of(connection: socket.socket) -> int:
    """Return the user whose process made the other end of a connection over loopback; `UnknownPeer` if that is not
    known.
    """
    try:
        theirs, ours = connection.getpeername()[:2], connection.getsockname()[:2]
    except OSError as error:
        raise UnknownPeer(f"it has ended: {error}") from error
    if sys.platform != "linux":
        raise UnknownPeer(f"{sys.platform} does not tell")
    try:
        return _ask_kernel(connection.family, theirs, ours)
    except OSError as error:
        if _kernel_answers and error.errno == errno.ENOENT:
            raise UnknownPeer("it has ended") from error
        try:
            return _read_tables(connection.family, theirs, ours)
        except OSError:
            raise UnknownPeer(f"the kernel does not tell: {error}") from error


def _ask_kernel(family: int, theirs: Address, ours: Address) -> int:
    global _kernel_answers  # noqa: PLW0603 - a fact about the kernel
    addresses = b"".join(socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (theirs, ours))
    question = QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    question += struct.pack("!HH", theirs[1], ours[1]) + addresses + COOKIE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(ANSWER_WITHIN_S)
        head = HEADER.pack(HEADER.size + len(question), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0)
        kernel.send(head + question)
        answer = kernel.recv(ANSWER_BYTES)
    if HEADER.unpack_from(answer)[1] == NLMSG_ERROR:
        code = -struct.unpack_from("=i", answer, HEADER.size)[0]
        raise OSError(code, os.strerror(code))
    _kernel_answers = True
    uid, inode = struct.unpack_from("=II", answer, FOUND_AT)
    return _owner(uid, inode)


def _read_tables(family: int, theirs: Address, ours: Address) -> int:
    table = Path("/proc/net/tcp6" if family == socket.AF_INET6 else "/proc/net/tcp")
    wanted = (_as_listed(family, theirs), _as_listed(family, ours))
    for line in table.read_text().splitlines()[1:]:
        words = line.split()
        if (words[1], words[2]) == wanted:
            return _owner(int(words[7]), int(words[9]))
    raise UnknownPeer("there is no such connection on this machine")


def _as_listed(family: int, address: Address) -> str:
    """Format an address as the tables do: words of the machine's own byte order, in hexadecimal digits."""
    packed = socket.inet_pton(family, address[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"


def _owner(uid: int, inode: int) -> int:
    if inode == 0:
        raise UnknownPeer("its process has closed it already")
    return uid
