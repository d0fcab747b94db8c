"""What a request says beside its object."""

from dataclasses import dataclass

from basilica_testkube.kinds import Kind


@dataclass(frozen=True, slots=True)
class Options:
    """What a write says beside its object."""

    field_validation: str = "Warn"
    field_manager: str = ""
    force: bool = False
    decoded: bool = False  # made by a controller from what was decoded before


DECODED = Options(decoded=True)


@dataclass(frozen=True, slots=True)
class DeleteOptions:
    """How an object is to be deleted."""

    grace: int | None = None
    propagation: str | None = None  # Background, Foreground or Orphan
    uid: str | None = None
    resource_version: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The object, or the part of one, that a request is about."""

    kind: Kind
    namespace: str
    name: str
    subresource: str = ""
