"""The options of a deploy, as whoever calls it sees them."""

from basilica.client.options import OWN, DeployOptions
from basilica.wire.spec import keywords


def test_the_typed_keywords_are_the_options() -> None:
    assert set(DeployOptions.__annotations__) == (keywords() | OWN) - {"name"}
