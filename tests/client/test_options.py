"""The options of a deploy, as whoever calls it sees them."""

from dataclasses import fields

from basilica.client.options import Deploy, DeployOptions


def test_the_typed_keywords_are_the_options() -> None:
    assert set(DeployOptions.__annotations__) == {f.name for f in fields(Deploy)} - {"name"}
