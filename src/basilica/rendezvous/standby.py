"""The parent process that holds the sockets of a service and forks it again when it is killed.

A client that connects while the service is away waits in the kernel's queue instead of being refused: a client such as
python-etcd, and torchrun with it, takes a refusal for the end. The parent does nothing else, so that there is little
that could end it. If it ends all the same, the service goes on, and is like any other that is started by hand.
"""

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable
from enum import StrEnum

from basilica.core.ends import exit_code_of

AGAIN_EVERY_S = 0.5  # a service that is killed over and over is not started more often
MESSAGE_BYTES = 256


class Word(StrEnum):
    """The messages of a service to its parent. Any other message is the name of a socket."""

    UP = "up"
    DONE = "done"


class Standby:
    """The service's side: sockets by name, which the next service inherits should this one be killed."""

    def __init__(self, inherited: dict[str, socket.socket], parent: socket.socket) -> None:
        self._inherited, self._parent = inherited, parent

    def take(self, name: str) -> socket.socket | None:
        """Return the socket that an earlier service held under this name, listening."""
        found = self._inherited.pop(name, None)
        if found is not None:
            found.listen(1024)
        return found

    def hold(self, name: str, listening: socket.socket) -> None:
        self._send(name, listening)

    def release(self, name: str, listening: socket.socket) -> None:
        """Stop listening, at once and for the parent too, and drop the socket."""
        _stop_listening(listening)
        self._send(name)

    def up(self) -> None:
        """Report that the service serves. Connections to sockets that it has not taken are refused from now on."""
        for left in self._inherited.values():
            _stop_listening(left)
        self._send(Word.UP)

    def done(self) -> None:
        """Report that the service ends on purpose, and wait until the parent has ended."""
        self._send(Word.DONE)
        with contextlib.suppress(OSError):
            self._parent.recv(1)

    def _send(self, what: str, *sockets: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, and its sockets with it
            socket.send_fds(self._parent, [what.encode()], [each.fileno() for each in sockets])


def served(serve: Callable[[Standby], int]) -> int:
    """Fork `serve`, and again whenever one is killed after the first was up; return the exit code of the one that
    ended.
    """
    held: dict[str, socket.socket] = {}
    was_up = False
    while True:
        began = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child = os.fork()
        if not child:
            ours.close()
            os._exit(_code_of(serve, Standby(held, theirs)))
        theirs.close()
        with ours:
            was_up = _hold_for(ours, held) or was_up
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0 or not was_up:
            return exit_code_of(code)
        _silence_stdout()
        time.sleep(max(0.0, began + AGAIN_EVERY_S - time.monotonic()))


def _code_of(serve: Callable[[Standby], int], standby: Standby) -> int:
    try:
        return serve(standby)
    except BaseException:  # noqa: BLE001 - nothing may return into the parent's code
        traceback.print_exc()
        return 1


def _hold_for(service: socket.socket, held: dict[str, socket.socket]) -> bool:
    """Hold the service's sockets until it is gone; return whether it was up. Never returns if the service is done."""
    was_up = False
    while True:
        message, descriptors, _, _ = socket.recv_fds(service, MESSAGE_BYTES, 1)
        match message.decode():
            case "":
                return was_up
            case Word.UP:
                was_up = True
            case Word.DONE:
                os._exit(0)
            case name:
                if name in held:
                    held.pop(name).close()
                if descriptors:
                    held[name] = socket.socket(fileno=descriptors[0])


def _stop_listening(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)


def _silence_stdout() -> None:
    """Redirect stdout to /dev/null: our parent has read that the service is up, and has closed its end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
