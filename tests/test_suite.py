"""The suite itself."""

import os

import pytest


@pytest.mark.xdist_group("together")
def test_marked_tests_stay_on_one_worker(request):
    """Else what they share is made once a worker, and compilers fight for the same cores."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("one process runs everything")
    assert request.node.nodeid.endswith("@together")
