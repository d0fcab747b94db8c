"""Names: the rule for names of runs, and every name that is derived from one."""

import re

from basilica.core.errors import ValidationError

NAME_MAX = 48
NAME_PATTERN = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"  # as schemas tell it; `check_name` gives a hint too
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_USER = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,46}[a-z0-9])?")


def check_name(name: str, field: str = "name") -> str:
    """Return `name` if a run may be called so; it becomes part of host and object names, hence the strictness."""
    if len(name) > NAME_MAX:
        raise ValidationError(field, name[:80], f"a name has at most {NAME_MAX} characters, this one has {len(name)}")
    if not _NAME.fullmatch(name):
        hint = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        better = f"; try {hint!r}" if hint and _NAME.fullmatch(hint) else ""
        raise ValidationError(
            field,
            name,
            f"a name is lower-case letters, digits and '-', beginning and ending with a letter or digit{better}",
        )
    return name


def check_user(user: str) -> str:
    if not _USER.fullmatch(user):
        raise ValidationError("user", user[:80], "a user is 1 to 48 lower-case letters, digits and '-'")
    return user


def namespace_of(user: str) -> str:
    return f"u-{user}"


def instance_name(name: str, token: str) -> str:
    """The name that is unique for ever; `token` is the caller's, since nothing random happens here."""
    return f"{name}-{token}"


def rank_name(instance: str, rank: int) -> str:
    """Return the name of a rank, the same wherever it runs (`podName` on the wire)."""
    return f"{instance}-{rank}"
