"""The base of all wire models: camelCase outside, snake_case inside, times as RFC 3339, nothing null."""

import math
from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic.alias_generators import to_camel


class Incoming(BaseModel):
    """A request: types are taken literally ("2" is no number), unknown fields are ignored."""

    model_config = ConfigDict(alias_generator=to_camel, strict=True, frozen=True, extra="ignore")


class Outgoing(BaseModel):
    """An answer: a field that is None is omitted, since clients accept an absent field where they refuse a null."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)

    def to_json(self) -> bytes:
        return self.__pydantic_serializer__.to_json(self, by_alias=True, exclude_none=True)


def _figure(value: float) -> float | str:
    """Return a number, or a text for one that is not finite: JSON has none, and an omitted NaN would hide a failure."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


Figure = Annotated[float | str, BeforeValidator(_figure)]


def rfc3339(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def rfc3339_or_none(moment: float | None) -> str | None:
    return None if moment is None else rfc3339(moment)
