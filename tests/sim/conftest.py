"""How long Hypothesis explores: `HYPOTHESIS_PROFILE=thorough` for a long hunt, otherwise what `make test` can afford.

`make test` explores the same lives every time, so that a red build is the change's doing. New lives are walked by
the thorough profile and by `python -m tests.sim.explore`; both print what brings a failure back.
"""

import os

from hypothesis import HealthCheck, settings

PROFILE = "thorough" if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else "quick"

_COMMON = settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.register_profile("quick", _COMMON, max_examples=500, stateful_step_count=40, derandomize=True, database=None)
settings.register_profile("thorough", _COMMON, max_examples=5_000, stateful_step_count=80)
