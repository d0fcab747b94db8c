"""What an object store's error means: that nobody answered, which may pass, or that the answer was no; in words."""

import re

_STATUS = re.compile(r"status code: (\d{3}[^:]*)")
_ELEMENT = re.compile(r"<(Code|Message)>([^<]*)</")
_PASSING = ("408", "429")
"""Refusals of a server that has too much to do."""
_ASKED_FOR_CREDENTIALS = ("169.254.", "metadata.google.internal")
"""Where a machine's own credentials are asked for if the environment has none."""


def will_pass(error: Exception) -> bool:
    """Whether the same request may succeed later: there was no answer, or one that says so."""
    status = _STATUS.search(str(error))
    return status is None or not status[1].startswith("4") or status[1].startswith(_PASSING)


def in_words(error: Exception) -> str:
    """One line, with what to do about it where that is known."""
    text = str(error)
    if any(place in text for place in _ASKED_FOR_CREDENTIALS):
        return (
            "needs credentials, and none were found: set those of the store in the environment, "
            "as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are for S3"
        )
    if will_pass(error):
        return f"does not answer: {text.partition(chr(10))[0]}"
    status, told = _STATUS.search(text), dict(_ELEMENT.findall(text))
    assert status is not None  # else it passes
    return f"refuses: {': '.join([status[1].strip(), *told.values()])}"
