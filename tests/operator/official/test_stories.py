"""The published client against the API of a cluster: the same stories, the same answers.

Left out are those of what is different there: logs begin with the gate's own lines, pods have names of their own, the
log of a rank that was dropped goes with its pod, images are used, and starting and deleting take as long as pods do.
"""

import pytest

from tests.e2e.official.test_account import (  # noqa: F401
    test_an_idle_connection_outlives_the_pause_between_two_looks,
    test_nothing_is_charged,
    test_nothing_is_published,
    test_the_server_is_healthy,
)
from tests.e2e.official.test_deploying import (  # noqa: F401
    test_a_job_that_ends_between_two_looks_was_deployed,
    test_a_name_is_free_again_when_its_run_has_ended,
)
from tests.e2e.official.test_ending import (  # noqa: F401
    test_every_way_to_end_is_told_apart,
    test_one_failure_ends_a_gang_that_needs_everybody,
    test_restarts_are_counted,
)
from tests.e2e.official.test_looking import (  # noqa: F401
    test_each_user_has_a_listing_of_their_own,
)
from tests.e2e.official.test_plain_deployments import (  # noqa: F401
    test_a_restart_gives_every_rank_a_fresh_start,
    test_an_image_alone_is_nothing_to_run,
)
from tests.e2e.official.test_refusing import (  # noqa: F401
    test_a_missing_name_is_not_found,
    test_a_request_that_is_too_large_is_refused,
    test_bad_requests_are_refused_with_the_field_and_the_problem,
    test_more_ranks_than_a_user_may_have_are_refused,
)
from tests.e2e.official.test_scaling import (  # noqa: F401
    test_a_run_of_which_a_rank_has_finished_cannot_be_scaled,
    test_a_size_out_of_bounds_is_refused,
    test_an_ended_run_cannot_be_scaled,
)
from tests.e2e.official.test_waiting import (  # noqa: F401
    test_a_cancelled_run_ends_the_wait,
    test_a_failed_run_ends_the_wait_for_its_target,
    test_wait_until_complete_async_does_the_same,
    test_wait_until_complete_refuses_what_is_over,
    test_wait_until_complete_returns_the_final_world,
    test_wait_until_complete_tells_how_ranks_failed,
    test_wait_until_complete_times_out_while_the_run_goes_on,
    test_waits_for_the_world_return_when_it_is_there,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
