"""The choice of a client's server: arguments, else the environment, else the saved login, else an embedded one."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from basilica.core import environment as env
from basilica.core.errors import ValidationError

URL_VARIABLE = env.API_URL
KEY_VARIABLES = (env.API_TOKEN, env.API_KEY)


@dataclass(frozen=True, slots=True)
class Target:
    """A server by its address, or the embedded one (`url` None)."""

    url: str | None
    key: str | None
    where_from: str


def find_target(base_url: str | None, api_key: str | None) -> Target:
    key = api_key or next((os.environ[v] for v in KEY_VARIABLES if os.environ.get(v)), None)
    if base_url:
        return Target(_checked(base_url), key, "argument")
    if os.environ.get(URL_VARIABLE):
        return Target(_checked(os.environ[URL_VARIABLE]), key, URL_VARIABLE)
    saved = load_login()
    if saved is not None:
        return Target(_checked(saved["url"]), key or saved.get("key"), str(login_file()))
    return Target(None, None, "embedded")


def login_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "basilica" / "login.json"


def load_login() -> dict[str, str] | None:
    try:
        saved = json.loads(login_file().read_text())
    except (OSError, ValueError):
        return None
    return saved if isinstance(saved, dict) and isinstance(saved.get("url"), str) else None


def save_login(url: str, key: str) -> Path:
    """Write the login atomically, in a file that only its owner can read."""
    path = login_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"url": _checked(url), "key": key}, file)
    fresh.rename(path)
    return path


def forget_login() -> bool:
    path = login_file()
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValidationError("base_url", url, "must begin with http:// or https://")
    return url.rstrip("/")
