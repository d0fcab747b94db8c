"""Marks for tests of what only one version of the published client has."""

import pytest

only_in_0_36_8 = pytest.mark.parametrize("version", ["0.36.8"], indirect=True, scope="session")
only_in_0_29_0 = pytest.mark.parametrize("version", ["0.29.0"], indirect=True, scope="session")
