"""The published client against the API of a cluster: the same stories, the same answers, and all of them.

Three answers differ, and their tests say so: pods have names of their own, images are used, and a GPU has to be there.
"""

import pytest

from tests.e2e.official.test_account import *  # noqa: F403
from tests.e2e.official.test_benching import *  # noqa: F403
from tests.e2e.official.test_deploying import *  # noqa: F403
from tests.e2e.official.test_ending import *  # noqa: F403
from tests.e2e.official.test_looking import *  # noqa: F403
from tests.e2e.official.test_plain_deployments import *  # noqa: F403
from tests.e2e.official.test_refusing import *  # noqa: F403
from tests.e2e.official.test_scaling import *  # noqa: F403
from tests.e2e.official.test_server_restart import *  # noqa: F403
from tests.e2e.official.test_waiting import *  # noqa: F403

pytestmark = pytest.mark.timeout(240)
