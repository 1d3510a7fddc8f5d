"""Figures of README, docs and CHANGELOG against the one file that holds them."""

import re
from datetime import date
from pathlib import Path

import pytest
from bars import PAGE, page
from claim_table import ROOT, SAMPLES, SIDES, TABLE, kept_figures, stated_claims, table
from claims import Claim

CLAIMS = stated_claims()
NAMES = [f"{claim.script.stem}: {claim.what[:40]} {claim.figure}" for claim in CLAIMS]
# Its figures are those of `tpukit kernel bench`, stated with the bands it prints.
ELSEWHERE = {"kernel_estimate.py", "kernel_rates.py"}
WITHOUT_FIGURE = {"input_rate.py", "kernel_bundles.py", "claim_table.py", "documents.py"}


@pytest.mark.parametrize("claim", CLAIMS, ids=NAMES)
def test_a_claim_says_what_it_compares_how_and_when(claim):
    sides = claim.compares.split(" : ")
    assert len(sides) == 2
    assert set(sides) <= set(SIDES)
    assert claim.sample in SAMPLES
    assert date(2026, 11, 1) <= date.fromisoformat(claim.date)
    assert claim.script.exists()
    assert 'if __name__ == "__main__"' in claim.script.read_text()


@pytest.mark.parametrize("claim", CLAIMS, ids=NAMES)
def test_documents_state_the_figure_of_the_file(claim):
    assert claim.docs
    for document in claim.docs:
        text = (ROOT / document).read_text()
        assert re.search(rf"(?<![\d.,]){re.escape(claim.figure)}", text), document


@pytest.mark.parametrize("claim", CLAIMS, ids=NAMES)
def test_a_bar_in_words_is_one_in_numbers_too(claim):
    said = re.search(r"\b(bar|target)\b", claim.what)
    assert bool(claim.bar.target) >= bool(said)
    if claim.bar.target:  # the number is one of those that the figure states
        numbers = re.findall(r"\d[\d.]*(?:e-?\d+)?", claim.figure)
        assert claim.worst in map(float, numbers)
        assert ("missed" in claim.what) <= (claim.bar.verdict == "MISSED")


def test_figures_whose_rows_are_kept_follow_from_them():
    kept = kept_figures()
    checked = [claim for claim in CLAIMS if claim.script.name in kept]
    assert {claim.script.name for claim in checked} == set(kept)
    for claim in checked:
        assert claim.figure in kept[claim.script.name], claim.what


def test_the_page_is_made_of_the_file():
    assert TABLE.read_text() == table()


def test_every_benchmark_that_a_document_cites_has_a_claim():
    cited: set[str] = set()
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        cited |= set(re.findall(r"benchmarks/(\w+\.py)", document.read_text()))
    runnable = {
        name
        for name in cited
        if 'if __name__ == "__main__"' in (ROOT / "benchmarks" / name).read_text()
    }
    claimed = {Path(claim.command.split()[1]).name for claim in CLAIMS}
    assert not runnable - claimed - ELSEWHERE - WITHOUT_FIGURE


def test_the_page_of_bars_is_made_of_what_is_kept():
    assert PAGE.read_text("utf-8") == page()


@pytest.mark.parametrize(
    ("bar", "verdict"),
    [
        ({"at_most": 1.0}, "MISSED"),
        ({"at_most": 2.0}, "met"),
        ({"at_least": 2.0}, "met"),
        ({"at_least": 3.0}, "MISSED"),
        ({}, ""),
    ],
)
def test_a_bar_is_cleared_or_missed(bar, verdict):
    claim = Claim("what", 2.0, "s", **bar)
    assert claim.verdict == verdict
    assert bool(claim.target) == bool(bar)
    assert not verdict or str(claim).endswith(verdict)
