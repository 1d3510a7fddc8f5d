"""The fitted rates: every number complete and cited, and read for the right generation."""

import copy

import pytest

from tpukit.errors import TPUValidationError
from tpukit.hardware import rates
from tpukit.hardware.catalog import generation_names
from tpukit.hardware.figure import ORIGINS
from tpukit.hardware.rates import SECTIONS, AttentionRates, ChipRates, StepRates, rates_file

BY_GENERATION = ("chip", "attention")
ABOUT = {"unit", "what"}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.section)
def test_every_rate_says_what_it_is_and_how_it_was_obtained(section):
    entries = rates_file()[section.section]
    for name, entry in entries.items():
        assert entry["unit"], name
        assert len(entry["what"]) > 10, name
        values = set(entry) - ABOUT
        legal = (
            {"default", *generation_names()} if section.section in BY_GENERATION else {"default"}
        )
        assert "default" in values, name
        assert values <= legal, f"{name} has a value for {values - legal}, which nothing reads"
    for generation in ("default", *generation_names()):
        for name, figure in section.figures(generation).items():
            if figure.value is None:
                assert len(figure.reason) > 10, name
            else:
                assert figure.origin in ORIGINS, name
                assert figure.source, name
                assert figure.date >= "2025-01-01", name


def test_no_source_is_described_in_vain():
    cited = {
        value["source"]
        for section in SECTIONS
        for entry in rates_file()[section.section].values()
        for value in entry.values()
        if isinstance(value, dict) and "source" in value
    }
    assert cited == set(rates_file()["sources"])


def test_a_generation_has_its_own_values_and_the_default_ones_else():
    assert ChipRates.of("v6e").matrix_efficiency == 0.85
    assert ChipRates.of("v6e").resident_mib == ChipRates.of("v4").resident_mib == 48
    assert ChipRates.of("v4") == ChipRates.of()


@pytest.mark.parametrize(
    ("generation", "head_dim", "share"),
    [
        ("v6e", 128, 0.37),
        ("v6e", 32, 0.20 / 2),  # a score takes as long as with the smallest head measured
        ("v6e", 96, 96 / ((64 / 0.20 + 128 / 0.37) / 2)),  # half way between two of them
        ("v6e", 160, 160 / (0.75 * 128 / 0.37 + 0.25 * 256 / 0.66)),
        ("v6e", 512, 0.66),
        ("v4", 128, 0.9 / 2),  # nobody measured it: other products reach 0.9, with 256 channels
        ("v4", 512, 0.9),
    ],
)
def test_attention_goes_by_the_heads_measured(generation, head_dim, share):
    assert AttentionRates.of(generation).share(head_dim, of_products=0.9) == pytest.approx(share)


def test_a_rate_that_is_missing_unknown_or_cites_nothing_is_refused(monkeypatch):
    for change, message in (
        (lambda step: step.pop("ring_waited"), "must have exactly.*unknown: ring_waited"),
        (lambda step: step.update(ring_wait={}), "must have exactly.*unknown: ring_wait"),
        (
            lambda step: step["ring_waited"]["default"].update(source="rumour"),
            "cites the source 'rumour'",
        ),
    ):
        content = copy.deepcopy(rates_file())
        change(content["step"])
        monkeypatch.setattr(rates, "rates_file", lambda content=content: content)
        with pytest.raises(TPUValidationError, match=message):
            StepRates.figures()
