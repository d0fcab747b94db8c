"""Where a new run goes on: an earlier run and, if one is chosen, its step. Written as `RUN` or `RUN@STEP`."""

import re
from dataclasses import dataclass

from basilica.core.errors import ValidationError

RESUME_PATTERN = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?(@[0-9]{1,18})?$"
RESUME_MAX = 100
_RESUME = re.compile(r"([a-z0-9](?:[-a-z0-9]*[a-z0-9])?)(?:@([0-9]{1,18}))?")


@dataclass(frozen=True, slots=True)
class Resume:
    """`run`: a friendly name in a request, the instance in a stored spec. `step` None: the newest complete one."""

    run: str
    step: int | None = None

    def __str__(self) -> str:
        return self.run if self.step is None else f"{self.run}@{self.step}"


def parse_resume(text: str, field: str = "resume_from") -> Resume:
    """Parse `RUN` or `RUN@STEP`; anything else is a `ValidationError` of that field."""
    found = _RESUME.fullmatch(text) if len(text) <= RESUME_MAX else None
    if found is None:
        problem = "must be RUN or RUN@STEP: the name of an earlier run, and the number of one of its steps"
        raise ValidationError(field, text[:RESUME_MAX], problem)
    run, step = found.groups()
    return Resume(run, None if step is None else int(step))
