"""Object stores that replicas can meet in: `file://` and `memory://` of our own, all others through obstore."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from basilica.diloco.stores.port import ObjectStore


def open_store(uri: str, options: Mapping[str, Any] | None = None, *, patience: float = 0.0) -> ObjectStore:
    """The store behind a URI. Nothing is opened yet: that happens on first use, in whichever process that is.

    `options` are obstore's settings for the scheme (`endpoint`, `region` …); else the usual environment counts.
    `patience`: for how many seconds a server that has answered before and does so no more is asked again.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(f"{uri!r} names no absolute path on this machine; write file:///some/directory")
        from basilica.diloco.stores.file import FileStore  # noqa: PLC0415

        return FileStore(unquote(parts.path))
    if parts.scheme == "memory":
        from basilica.diloco.stores.memory import MemoryStore  # noqa: PLC0415

        return MemoryStore.named(parts.netloc + parts.path)
    if not parts.scheme:
        raise ValueError(f"{uri!r} has no scheme; write file:///some/directory, s3://bucket/prefix or memory://name")
    from basilica.diloco.stores.cloud import CloudStore  # noqa: PLC0415

    return CloudStore(uri, dict(options or {}), patience)


__all__ = ["ObjectStore", "open_store"]
