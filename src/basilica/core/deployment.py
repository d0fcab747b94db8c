"""One run as a store holds it: what is wanted beside what was observed."""

from dataclasses import dataclass

from basilica.core.spec import DeploymentSpec
from basilica.core.status import DeploymentStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """`version` grows with every change of any run in the store, so it orders them all."""

    instance: str
    user: str
    namespace: str
    spec: DeploymentSpec
    status: DeploymentStatus
    version: int
