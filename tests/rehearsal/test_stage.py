"""Figures of different machines stand beside each other, and no ratio is made of them."""

import pytest

from tpukit.hardware.figure import Figure
from tpukit.rehearsal.stage import Beside, figure_text, measured


def pair(predicted, got, *, comparable):
    return Beside(
        what="step",
        predicted=predicted,
        predicted_of="v6e-4",
        measured=got,
        is_comparable=comparable,
    )


STEP = Figure(0.002, "s", "model", "timeline")


def test_what_can_be_compared_has_a_ratio():
    found = pair(STEP, measured(0.003, "s", "clock"), comparable=True)
    assert found.ratio == pytest.approx(1.5)
    assert found.ratio_text == "1.5 ×"


def test_a_tpu_is_not_held_against_a_cpu():
    found = pair(STEP, measured(0.3, "s", "clock"), comparable=False)
    assert found.ratio is None
    assert found.ratio_text == "different machines"
    assert found.to_dict()["ratio"] is None


def test_a_figure_that_is_missing_says_why():
    found = pair(STEP, Figure.missing("s", "nobody looked"), comparable=True)
    assert (found.ratio, found.ratio_text) == (None, "–")
    assert found.to_dict()["measured"]["reason"] == "nobody looked"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0265, "s", "26.5 ms"),
        (0.437, "share", "43.7%"),
        (4096, "B", "4 KiB"),
        (7, "steps", "7 steps"),
    ],
)
def test_figures_are_short(value, unit, text):
    assert figure_text(measured(value, unit, "here")) == text
