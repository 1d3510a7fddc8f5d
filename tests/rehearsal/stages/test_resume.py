"""Losses are the same to the bit, or the rehearsal has failed."""

import math

import pytest

from tpukit.rehearsal.stages.preempt import Resume

LOSSES = {1: 5.5, 2: 4.25, 3: 1 / 3}


def test_equal_losses_pass():
    assert Resume(LOSSES, dict(LOSSES)).is_good


@pytest.mark.parametrize(
    "other",
    [
        {**LOSSES, 3: math.nextafter(1 / 3, 1)},
        {**LOSSES, 2: None},
        {1: 5.5, 2: 4.25},
        {**LOSSES, 4: 0.1},
        {},
    ],
)
def test_the_least_difference_fails(other):
    found = Resume(LOSSES, other)
    assert not found.is_good
    assert found.different
    assert "differ" in found.sentence
    assert not Resume(other, LOSSES).is_good


def test_signs_of_zero_differ():
    assert Resume({1: 0.0}, {1: -0.0}).different == [1]


def test_nothing_to_compare_is_not_equal():
    assert not Resume({}, {}).is_good
    assert Resume({}, {}).sentence == "there are no losses to compare"
