"""Browser sessions, opened by one-time links, so that nobody pastes a key and no browser stores one.

A link is made with an API key and is valid for one login within minutes. Its session expires after a week, and ends
with a log-out or with the key of the link. Sessions are persisted in a file beside the state, so that an open page
remains logged in when the server restarts; the file has only digests of their tokens.
"""

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from basilica.core.errors import AuthenticationError, AuthorizationError, StoreUnavailable
from basilica.ports import ApiKey, Clock, Keys
from basilica.server.auth import authenticate, digest_of

LINK_SECONDS = 300.0
SESSION_SECONDS = 7 * 86400.0
LINKS_KEPT = 1000
SESSIONS_KEPT = 1000
SESSIONS_FILE = "console-sessions.json"
CONSOLE_HEADER = "x-basilica-console"
CHANGES_NOTHING = ("GET", "HEAD", "OPTIONS")

Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A one-time login: until it expires, `code` opens one session of `user`."""

    code: str
    user: str
    key_digest: str
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    user: str
    key_digest: str
    expires_at: float


class Sessions:
    """All links and sessions. With a `path`, sessions outlive the server."""

    def __init__(self, clock: Clock, path: Path | None = None) -> None:
        self._clock, self._path = clock, path
        self._links: dict[str, Link] = {}  # oldest first, as the sessions
        self._sessions: dict[str, Session] = {}
        # A browser sends cookies to every port of a host: a name of its own keeps each server's session apart.
        self.cookie = f"basilica-{secrets.token_hex(4)}"
        self._load()

    def offer(self, key: ApiKey) -> Link:
        """Return a new one-time link for the owner of a key."""
        now = self._clock.now()
        self._links = _newest({c: link for c, link in self._links.items() if link.expires_at > now}, LINKS_KEPT - 1)
        link = Link(code=secrets.token_urlsafe(32), user=key.user, key_digest=key.digest, expires_at=now + LINK_SECONDS)
        self._links[link.code] = link
        return link

    def open(self, code: str) -> str | None:
        """Open a session and return its token; None for a code that is used, expired or unknown."""
        link = self._links.pop(code, None)
        now = self._clock.now()
        if link is None or link.expires_at <= now:
            return None
        token = secrets.token_urlsafe(32)
        live = {digest: session for digest, session in self._sessions.items() if session.expires_at > now}
        self._sessions = _newest(live, SESSIONS_KEPT - 1)
        self._sessions[digest_of(token)] = Session(
            user=link.user, key_digest=link.key_digest, expires_at=now + SESSION_SECONDS
        )
        self._save()
        return token

    def find(self, token: str) -> Session | None:
        session = self._sessions.get(digest_of(token))
        return session if session is not None and session.expires_at > self._clock.now() else None

    def close(self, token: str) -> None:
        if self._sessions.pop(digest_of(token), None) is not None:
            self._save()

    def token_in(self, cookies: str | None) -> str | None:
        """Return this server's token among the cookies of a request."""
        return cookie_parser(cookies).get(self.cookie) if cookies else None

    def _load(self) -> None:
        """Load the persisted sessions. An unreadable file does not prevent serving: people log in again."""
        if self._path is None:
            return
        try:
            kept = json.loads(self._path.read_bytes())
            self._sessions = {digest: Session(**fields) for digest, fields in kept["sessions"].items()}
            self.cookie = str(kept["cookie"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            self._sessions = {}

    def _save(self) -> None:
        """Write the file atomically, readable only by its owner."""
        if self._path is None:
            return
        fresh = self._path.with_name(self._path.name + ".new")
        sessions = {digest: asdict(session) for digest, session in self._sessions.items()}
        try:
            fresh.unlink(missing_ok=True)
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump({"cookie": self.cookie, "sessions": sessions}, file)
            fresh.rename(self._path)
        except OSError as error:
            raise StoreUnavailable(f"cannot write {self._path}: {error.strerror}") from error


def _newest(kept: dict[str, Kept], count: int) -> dict[str, Kept]:
    return dict(list(kept.items())[-count:])


async def user_of(keys: Keys, sessions: Sessions, method: str, headers: Headers) -> str:
    """Return the requesting user: by the key of the Authorization header, else by the session of the cookie."""
    header, token = headers.get("authorization"), sessions.token_in(headers.get("cookie"))
    if header is not None or token is None:
        return (await authenticate(keys, header)).user
    session = sessions.find(token)
    if session is None or await keys.find_key(session.key_digest) is None:
        raise AuthenticationError("this session has ended: 'basilica console' opens a new one")
    if method not in CHANGES_NOTHING and not _from_our_page(headers):
        raise AuthorizationError("a session changes things only from the console's own page")
    return session.user


def _from_our_page(headers: Headers) -> bool:
    """Return whether the console made the request. A browser adds the cookie to requests of any page. No other page
    can send our header, since no CORS answer permits it; and all current browsers name the origin of a request."""
    return CONSOLE_HEADER in headers and headers.get("sec-fetch-site", "same-origin") == "same-origin"
