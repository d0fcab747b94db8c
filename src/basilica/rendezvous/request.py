"""Parser from the pieces of an HTTP request to a `Request`, with the checks, and in the order, of etcd 3.4."""

import binascii
import re
from collections.abc import Mapping, Sequence

from basilica.rendezvous.keyspace import (
    INDEX_NAN,
    INVALID_FIELD,
    INVALID_FORM,
    PREV_VALUE_REQUIRED,
    REFRESH_TTL_REQUIRED,
    REFRESH_VALUE,
    SECOND,
    TTL_NAN,
    EtcdError,
    Request,
)

Form = Mapping[str, Sequence[str]]

TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))
UINT64 = 1 << 64
DEEPEST = 400  # etcd knows no such limit; a tree that is walked by recursion needs one

_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def unescape(raw: bytes, *, plus: bool) -> str:
    """Decode `%41` (and `+` in a query); bytes that are no UTF-8 become surrogates. A broken escape is a
    `ValueError`.
    """
    if plus:
        raw = raw.replace(b"+", b" ")
    if b"%" in raw:
        broken = _BROKEN_ESCAPE.search(raw)
        if broken is not None:
            shown = raw[broken.start() : broken.start() + 3].decode(errors="replace")
            raise ValueError(f'invalid URL escape "{shown}"')
        # Quoted-printable is the same with another sign, and is decoded in C: a value may have a million escapes.
        raw = binascii.a2b_qp(raw.replace(b"=", b"=3D").replace(b"%", b"="))
    return raw.decode(errors="surrogateescape")


def parse_form(query: bytes, body: bytes) -> dict[str, list[str]]:
    """Return body and query parameters in one form; the body's come first, and the first of a name counts."""
    form: dict[str, list[str]] = {}
    for part in (*body.split(b"&"), *query.split(b"&")):
        if not part:
            continue
        if b";" in part:
            raise EtcdError(INVALID_FORM, "invalid semicolon separator in query")
        name, _, value = part.partition(b"=")
        try:
            form.setdefault(unescape(name, plus=True), []).append(unescape(value, plus=True))
        except ValueError as error:
            raise EtcdError(INVALID_FORM, str(error)) from None
    return form


def parse_request(method: str, path: str, form: Form, now: int) -> Request:
    """Return a request for the key `path` (clean, absolute), or raise the `EtcdError` that etcd answers with."""
    if path.count("/") > DEEPEST:
        raise EtcdError(INVALID_FORM, f"the key has more than {DEEPEST} parts")
    prev_index = _uint(form, "prevIndex", INDEX_NAN)
    wait_index = _uint(form, "waitIndex", INDEX_NAN)
    recursive, ordered, wait, dir_, quorum, stream = (
        _bool(form, name) for name in ("recursive", "sorted", "wait", "dir", "quorum", "stream")
    )
    if wait and method != "GET":
        raise EtcdError(INVALID_FIELD, '"wait" can only be used with GET requests')
    prev_value = _first(form, "prevValue")
    if "prevValue" in form and not prev_value:
        raise EtcdError(PREV_VALUE_REQUIRED, '"prevValue" cannot be empty')
    no_value = _bool(form, "noValueOnSuccess")
    ttl = _uint(form, "ttl", TTL_NAN) if _first(form, "ttl") else None
    prev_exist = _bool(form, "prevExist", shown="prevExist") if "prevExist" in form else None
    refresh = _bool(form, "refresh", shown="refresh")
    value = _first(form, "value")
    if refresh and value:
        raise EtcdError(REFRESH_VALUE, "A value was provided on a refresh")
    if refresh and ttl is None:
        raise EtcdError(REFRESH_TTL_REQUIRED, "No TTL value set")
    return Request(
        method=method,
        path=path,
        value=value,
        dir=dir_,
        recursive=recursive,
        sorted=ordered,
        prev_exist=prev_exist,
        prev_value=prev_value,
        prev_index=prev_index,
        refresh=refresh,
        deadline=None if ttl is None else _int64(now + _int64(ttl * SECOND)),
        wait=wait,
        wait_index=wait_index,
        stream=stream,
        quorum=quorum,
        no_value=no_value,
    )


def _first(form: Form, name: str) -> str:
    return form[name][0] if name in form else ""


def _uint(form: Form, name: str, code: int) -> int:
    if name not in form:
        return 0
    text = form[name][0]
    digits = text.lstrip("0") or text[:1]
    if not (text.isascii() and text.isdigit()) or len(digits) > 20 or int(digits) >= UINT64:
        raise EtcdError(code, f'invalid value for "{name}"')
    return int(digits)


def _bool(form: Form, name: str, *, shown: str | None = None) -> bool:
    if name not in form:
        return False
    text = form[name][0]
    if text in TRUE:
        return True
    if text in FALSE:
        return False
    raise EtcdError(INVALID_FIELD, f"invalid value for {shown}" if shown else f'invalid value for "{name}"')


def _int64(number: int) -> int:
    """Wrap around as Go's arithmetic does: a huge TTL is not an error there."""
    return (number + (1 << 63)) % UINT64 - (1 << 63)
