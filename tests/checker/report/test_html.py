"""The page as text: complete, escaped, honest about what is missing, small."""

import copy
import json
import re

import pytest
from page_reader import PageReader

from tpukit.checker.report import write_html
from tpukit.checker.report.html import render_html
from tpukit.checker.report.schema import SCHEMA
from tpukit.errors import TPUValidationError

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
PARTS = (
    *("job", "slice", "chip", "memory", "live_memory", "prediction", "spans", "collectives"),
    *("compile", "versions", "options", "fixes", "next", "verdict", "program", "no_prediction"),
)


def test_the_verdict_and_its_figures_come_first(report):
    text = PageReader(render_html(report)).text
    for words in (
        "FITS tiny on v6e-8",
        "The compiler plans 3 GiB of 31.25 GiB HBM per device (9.6%): 28.25 GiB free.",
        "Predicted step model 100 ms 90 ms to 112 ms",
        "MFU model 30.0%",  # 2.2032e14 / 0.1 s / (8 x 918e12)
        "causal attention counted once",
        "Tokens/s/chip model 20,480",  # 16,384 / 0.1 s / 8
        "Held back by model the matrix unit 60% of the step",
        "limit 31.25 GiB",
        "fullest",
        "model.py:40",
        "while.1 runs 4 times, 20 ms each",
        "all-gather",
        "80 ms of transfers in a step; the core waits 20 ms for them",
        "918 bf16 TFLOP/s",
        "tpukit train tiny.yaml",
        "remat: full",
        "xla_tpu_x",
        "0.0.42.1",
        "not donated",
        "28 smaller buffers",
    ):
        assert words in text, words
    assert text.index("FITS") < text.index("HBM by purpose")


def test_a_refused_program_is_told_the_way_out_before_anything_else(report):
    memory = {**report["memory"], "fits": False, "total_bytes": 40 * 2**30}
    report = {
        **report,
        "verdict": "does not fit",
        "memory": memory,
        "prediction": None,
        "no_prediction": "a program that does not fit takes no step",
    }
    text = PageReader(render_html(report)).text
    assert "DOES NOT FIT tiny on v6e-8" in text
    assert "8.75 GiB too much" in text
    assert "Held back by compiler HBM capacity" in text
    assert "No step time, timeline, roofline or table of collectives: a program that" in text
    assert text.index("remat: full") < text.index("HBM by purpose")


@pytest.mark.parametrize("part", PARTS)
def test_any_part_may_be_missing(report, part):
    del report[part]
    assert PageReader(render_html(report)).text


def test_a_report_of_nothing_says_so_everywhere():
    text = PageReader(render_html({"schema": SCHEMA})).text
    assert "COULD NOT TELL" in text
    assert "This report holds no memory report." in text
    assert "the check stopped at the verdict on memory" in text


def poison(value):
    """The same data with every text and every free key turned into an attack."""
    if isinstance(value, dict):
        return {key: poison(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [poison(inner) for inner in value]
    return EVIL if isinstance(value, str) else value


def test_no_text_of_the_program_becomes_markup(report):
    harmless = PageReader(render_html(report))
    evil = {**poison(copy.deepcopy(report)), "schema": SCHEMA, "verdict": "fits"}
    evil["job"] = {EVIL: EVIL}
    evil["options"] = {EVIL: {EVIL: EVIL}}
    evil["versions"] = {EVIL: EVIL}
    evil["fixes"][0]["changes"] = {EVIL: EVIL}
    evil["memory"]["purposes"] = {EVIL: 3}
    evil["prediction"]["seconds_by_cause"] = {EVIL: 0.1}
    for span, good in zip(evil["spans"], report["spans"], strict=True):
        span["track"] = good["track"]
    page = PageReader(render_html(evil))
    kinds = {tag for tag, _ in page.elements}
    assert kinds <= {tag for tag, _ in harmless.elements}
    assert page.verbatim["style"] == harmless.verbatim["style"]
    assert page.verbatim["script"][1:] == harmless.verbatim["script"][1:]  # all but the data
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert EVIL.replace("\n", " ") in page.text  # shown as the text it is
    assert EVIL in json.loads(page.verbatim["script"][0])["timeline"]["texts"]


def test_every_number_column_and_card_says_where_it_is_from(report):
    text = render_html(report)
    cards = re.findall(r'<div class="card">.*?</div></div>', text)
    assert len(cards) == 4
    assert all("badge from-" in card for card in cards)
    for caption in ("HBM by purpose", "Largest buffers", "Time by cause", "Collectives"):
        table = text[text.index(f"<caption>{caption}") :]
        assert "badge from-" in table[: table.index("</thead>")]


def test_a_step_of_a_hundred_thousand_ops_stays_small(report, tmp_path):
    span = report["spans"][2]
    report["spans"] = [
        {**span, "name": f"fusion.{place}", "start_s": place * 1e-6, "duration_s": 1e-6, "times": 1}
        for place in range(100_000)
    ]
    path = write_html(report, tmp_path / "report.html")
    assert path.stat().st_size < 1.5e6
    assert "The 88,000 shortest ops are left out." in path.read_text()


def test_what_is_no_report_is_not_drawn(tmp_path):
    with pytest.raises(TPUValidationError, match="no report of a check"):
        write_html({"verdict": "fits"}, tmp_path / "report.html")
    assert not list(tmp_path.iterdir())
