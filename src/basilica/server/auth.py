"""Authentication by API keys, of which only digests are stored."""

import hashlib
import secrets

from basilica.core.errors import AuthenticationError, ValidationError
from basilica.core.names import check_user
from basilica.ports import ApiKey, Keys

KEY_PREFIX = "bsk_"
KEY_LENGTH_MIN = 16  # of keys that people choose; generated keys have 47


class MissingKey(AuthenticationError):
    code = "BASILICA_API_AUTH_MISSING"


def digest_of(key: str) -> str:
    """Return the digest that is stored for a key. Keys are long and random, so a plain hash cannot be reversed."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_record(key: str, user: str, now: float, note: str = "") -> ApiKey:
    digest = digest_of(key)
    return ApiKey(id=digest[:12], user=check_user(user), digest=digest, created_at=now, note=note)


def check_key(key: str) -> str:
    """Validate a key that a person chose, and return it without surrounding white space; it must fit into a header."""
    key = key.strip()
    if not key:
        raise ValidationError("API key", "nothing", "is empty")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ValidationError("API key", f"{len(key)} characters", "must be printable ASCII without spaces")
    if len(key) < KEY_LENGTH_MIN:
        problem = f"must have at least {KEY_LENGTH_MIN} characters; 'basilica keys create' makes a good one"
        raise ValidationError("API key", f"{len(key)} characters", problem)
    return key


async def authenticate(keys: Keys, header: str | None) -> ApiKey:
    """Return the record of the key in an Authorization header."""
    if not header:
        raise MissingKey("no API key: send the header 'Authorization: Bearer KEY'")
    scheme, _, key = header.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise MissingKey("the Authorization header must read 'Bearer KEY'")
    found = await keys.find_key(digest_of(key.strip()))
    if found is None:
        raise AuthenticationError("this API key is not known here, or was revoked")
    return found
