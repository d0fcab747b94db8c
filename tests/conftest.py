"""Settings of all tests."""

import pytest

pytest.register_assert_rewrite("basilica.testing.store_contract")
