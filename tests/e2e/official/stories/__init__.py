"""What users of the published client do, and what they see. Each story is told again by the test of its name."""

from tests.e2e.official.stories import (
    account,
    benching,
    deploying,
    ending,
    looking,
    plain_deployments,
    refusing,
    scaling,
    server_restart,
    waiting,
)

__all__ = [
    "account",
    "benching",
    "deploying",
    "ending",
    "looking",
    "plain_deployments",
    "refusing",
    "scaling",
    "server_restart",
    "waiting",
]
