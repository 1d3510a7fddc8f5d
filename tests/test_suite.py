"""The suite itself."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.xdist_group("together")
def test_marked_tests_stay_on_one_worker(request):
    """Else what they share is made once a worker, and compilers fight for the same cores."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("one process runs everything")
    assert request.node.nodeid.endswith("@together")


def test_slow_cases_are_those_of_tests_that_exist():
    for case in (HERE / "slow_cases.txt").read_text().splitlines():
        file, *_, function = case.partition("[")[0].split("::")
        assert f"def {function}(" in (HERE.parent / file).read_text(), case
