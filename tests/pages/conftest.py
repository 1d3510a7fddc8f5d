"""Every kind of page, each with a text of the user's wherever one can be."""

from dataclasses import fields, replace

import pytest
from sample_rehearsal import sample_rehearsal
from sample_report import sample_report

from tpukit.checker.report.html import render_html
from tpukit.checker.report.schema import SCHEMA
from tpukit.planner.answer.page import render_page
from tpukit.planner.planning import plan
from tpukit.planner.search.rejections import Rejection
from tpukit.rehearsal.page import render_page as render_rehearsal
from tpukit.training.data.inspection import Inspection, LengthBin, TokenCount, render_inspection

# What a report says of its own making; the rest is from the user's program and machine.
OWN_WORDS = {"schema", "verdict", "track", "cause", "origin", "unit", "space"}


def everywhere(value, text):
    """The same data with `text` for every text."""
    if isinstance(value, dict):
        return {
            key: inner if key in OWN_WORDS else everywhere(inner, text)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [everywhere(inner, text) for inner in value]
    return text if isinstance(value, str) else value


def check_page(text):
    report = everywhere(sample_report(), text)
    report |= {"schema": SCHEMA, "job": {text: text}, "options": {text: {text: text}}}
    report["versions"] = {text: text}
    report["fixes"][0]["changes"] = {text: text}
    report["memory"]["purposes"] = {text: 3}
    return render_html(report)


@pytest.fixture(scope="session")
def plan_page():
    found = plan("llama3.2-1b", tokens=1e9, on="v6e", max_chips=64, verify=False)

    def render(text):
        choices = tuple(
            replace(one, region=text, job=one.job.replace(model=text)) for one in found.choices
        )
        return render_page(
            replace(
                found,
                ask=replace(found.ask, subject=replace(found.ask.subject, name=text)),
                choices=choices,
                unpriced=choices,
                front=choices,
                shortfall=text,
                rejected=(Rejection((text,), text),),
                disagreements=(text,),
                assumptions=(text,),
            )
        )

    return render


def data_page(text):
    made = Inspection(
        **{entry.name: text for entry in fields(Inspection) if entry.type in ("str", str)},
        **dict.fromkeys(("shards", "num_tokens", "num_documents", "distinct_tokens"), 3),
        **dict.fromkeys(("smallest_token", "largest_token"), 3),
        unigram_entropy_nats=1.0,
        tokenizer=text,
        document_lengths=(LengthBin(1, 1, 3),),
        length_percentiles={50: 1},
        most_frequent=(TokenCount(3, 3, text),),
    )
    return render_inspection(made)


@pytest.fixture(scope="session")
def kinds(plan_page):
    return {
        "check": check_page,
        "plan": plan_page,
        "data": data_page,
        "rehearsal": lambda text: render_rehearsal(sample_rehearsal(text)),
    }


@pytest.fixture(params=["check", "plan", "data", "rehearsal"])
def render(request, kinds):
    """One kind of page, as a function of the user's text."""
    return kinds[request.param]
