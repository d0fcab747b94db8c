"""One run as a store has it: the spec that is wanted beside the status that was observed."""

from dataclasses import dataclass

from basilica.core.spec import DeploymentSpec
from basilica.core.status import DeploymentStatus


@dataclass(frozen=True, slots=True)
class Owner:
    """The object that stands for a run in a cluster: what is made for the run belongs to it and goes with it."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One run. `version` grows with every change of any run in the store, so it orders all changes."""

    instance: str
    user: str
    namespace: str
    spec: DeploymentSpec
    status: DeploymentStatus
    version: int
    owner: Owner | None = None
