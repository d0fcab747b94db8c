"""What a forked child does to become `basilica`. The fork server imports this, so that children start quickly."""

import os
import resource
import sys
from multiprocessing.connection import Connection

import uvicorn.protocols.http.httptools_impl  # noqa: F401

import basilica.cli.local_server
import basilica.wiring.local  # noqa: F401
from basilica.cli.main import main


def become_basilica(
    arguments: list[str], env: dict[str, str], stdout: Connection, stderr: str, descriptors: int | None
) -> None:
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    os.environ.clear()
    os.environ.update(env)
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    sys.argv = ["basilica", *arguments]
    main()
