"""The meaning of an object store's error, in words: no answer, which may be transient, or a refusal."""

import re

_STATUS = re.compile(r"status code: (\d{3}[^:]*)")
_CODE = re.compile(r"\(code: (\w+)\)")
"""The answer to one key of a request for many: `Access Denied (code: AccessDenied)`."""
_PASSING_CODES = ("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted")
_ELEMENT = re.compile(r"<(Code|Message)>([^<]*)</")
_PASSING = ("408", "429")
"""Refusals of a server that has too much to do."""
_ASKED_FOR_CREDENTIALS = ("169.254.", "metadata.google.internal")
"""Where a machine's own credentials are asked for if the environment has none."""


def will_pass(error: Exception) -> bool:
    """Return whether the same request may succeed later: there was no answer, or a transient one."""
    status, code = _STATUS.search(str(error)), _CODE.search(str(error))
    if status is None and code is not None:
        return code[1] in _PASSING_CODES
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
    if status is None:
        return f"refuses: {text.partition(chr(10))[0]}"
    return f"refuses: {': '.join([status[1].strip(), *told.values()])}"
