"""Readable names for runs that were given none."""

import secrets

_HOW = """
amber azure bold brave bright calm clear cosmic crisp deep eager early fair fleet gentle golden grand green happy keen
kind late light lively lucky mellow merry mighty noble quick quiet rapid red royal sharp silent silver smart solid
steady stellar still sunny swift tidy vivid warm wild wise
"""
_WHAT = """
arch basin beacon bridge brook canyon cedar cliff cloud comet coral crane delta dune eagle ember falcon fern field
fjord forest garden grove harbor hawk heron hill island lagoon lake lark maple meadow moon nave oak ocean otter peak
pine planet prairie quartz raven reef ridge river sparrow spire spring star stone stream summit tower valley
"""


def readable_name() -> str:
    return f"{secrets.choice(_HOW.split())}-{secrets.choice(_WHAT.split())}-{secrets.randbelow(90) + 10}"
