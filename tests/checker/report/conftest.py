"""A report with every part."""

import pytest
from sample_report import PREDICTION, sample_report


@pytest.fixture
def report():
    return sample_report()


@pytest.fixture
def step():
    return PREDICTION
