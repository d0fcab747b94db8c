"""The placeholders of a rank's own values in a command line that no shell reads. Pure."""

import re
from collections.abc import Collection, Mapping, Sequence

# Everything else that looks like a variable is the program's own affair.
_VARIABLE = re.compile(
    r"\$(?:\{(?P<braced>NAME)\}|(?P<bare>NAME)(?![A-Za-z0-9_]))".replace(
        "NAME", r"BASILICA_[A-Z0-9_]+|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|NODE_NAME"
    )
)


def expanded(argv: Sequence[str], environment: Mapping[str, str], hidden: Collection[str] = ()) -> list[str]:
    """Return the command line with the rank's own values in it.

    A name without a value stays as it is, and so does one of the `hidden`: others can see command lines.
    """

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["bare"]
        return match[0] if name in hidden else environment.get(name, match[0])

    return [_VARIABLE.sub(value, part) for part in argv]
