"""A plan that was kept as JSON shows the same page as the plan itself."""

import json

import pytest

from tpukit.errors import TPUValidationError
from tpukit.planner.answer.page import render_page
from tpukit.planner.answer.result import RecordedPlan
from tpukit.planner.planning import plan


@pytest.fixture(scope="module", params=[False, True], ids=["on demand", "spot"])
def found(request):
    return plan(
        "llama3.2-1b", tokens=1e9, on="v6e,v5p", max_chips=64, spot=request.param, verify=False
    )


def test_the_page_of_a_kept_plan_is_the_page_of_the_plan(found):
    kept = RecordedPlan.from_dict(json.loads(json.dumps(found.to_dict())))
    assert render_page(kept) == render_page(found)
    assert [one.to_dict() for one in kept.choices] == [one.to_dict() for one in found.choices]


def test_what_is_no_plan_is_refused_with_the_way_out(found):
    data = found.to_dict()
    for wrong in (None, [], {}, {**data, "schema": "tpukit.report/1"}, {**data, "choices": [{}]}):
        with pytest.raises(TPUValidationError, match="tpukit plan"):
            RecordedPlan.from_dict(wrong)
