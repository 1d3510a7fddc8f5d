import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import kernel_rates as rates
import pytest
from measured_kernels import MeasuredRow, read_timings
from measured_kernels.rows import rows_in_view

from kernels import TIMINGS
from tpukit.hardware import get_chip
from tpukit.hardware.rates import ChipRates

HBM = ChipRates.of("v6e").hbm_efficiency


@dataclass(frozen=True)
class Kernel:
    """A kernel that computes, moves bytes and turns its loop, one after the other."""

    row: object
    compute_us: float
    bytes_us: float
    turns: float
    kind: str = "flash_attention"
    chip: str = "v6e"

    @property
    def profile(self):
        return SimpleNamespace(chip=get_chip(self.chip))

    def time_us(self, calibration):
        return (
            self.compute_us * calibration.compute_factor
            + self.bytes_us / calibration.hbm_efficiency
        )  # at the rate of all ops: nothing to fit


def kernels(*, factor, turn_cycles, count=24, kind="flash_attention"):
    made = []
    for number in range(count):
        compute, moved, turns = 100.0 * (1 + number % 5), 80.0 * (1 + number % 3), 64.0 * number
        measured = compute * factor + moved / HBM + turns * turn_cycles / 1750
        row = MeasuredRow.model_validate(
            {
                "id": f"r{number}",
                "device": "v6e",
                "op": "attention_fwd",
                "impl": "pallas_mosaic_tpu",
                "dims": {"q_len": 128 * (number + 1)},
                "shapes": {},
                "measured_us": measured,
            }
        )
        made.append(Kernel(row, compute, moved, turns, kind))
    return made


def test_rates_are_those_the_times_were_made_with():
    (found,) = rates.fit_rates(kernels(factor=1.1, turn_cycles=200))
    assert found.chip == "v6e"
    for constants in (found.calibration, found.kinds["flash_attention"]):
        assert constants.compute_factor == pytest.approx(1.1)
        assert constants.hbm_efficiency == HBM
        assert constants.turn_cycles == 200
    bands = rates.error_bands(found.estimated)["v6e"]
    assert [band.kinds for band in bands] == [{"flash_attention": 24}]
    assert bands[0].median < 0.01


def test_a_chip_that_is_twice_as_slow_as_any_rate_allows_has_a_wide_band():
    (found,) = rates.fit_rates(kernels(factor=5.0, turn_cycles=0))
    (band,) = rates.error_bands(found.estimated)["v6e"]
    assert band.median > 0.3
    assert band.above > 0.5


def test_kinds_that_differ_have_rates_of_their_own():
    fast = kernels(factor=0.8, turn_cycles=0)
    slow = kernels(factor=1.2, turn_cycles=0, kind="grouped_matmul")
    (found,) = rates.fit_rates([*fast, *slow])
    assert found.kinds["flash_attention"].compute_factor == pytest.approx(0.8)
    assert found.kinds["grouped_matmul"].compute_factor == pytest.approx(1.2)
    assert all(one.error < 0.01 for one in found.estimated)


def test_a_kind_with_few_rows_has_no_band_of_its_own():
    few = kernels(factor=1.0, turn_cycles=0, count=2, kind="cross_entropy")
    many = kernels(factor=1.0, turn_cycles=0)
    (found,) = rates.fit_rates([*many, *few])
    bands = rates.error_bands(found.estimated)["v6e"]
    assert [band.kinds for band in bands] == [
        {"cross_entropy": 2, "flash_attention": 24},
        {"flash_attention": 24},
    ]


def test_the_file_holds_what_was_fitted():
    fitted = rates.fit_rates(kernels(factor=1.1, turn_cycles=200))
    bands = rates.error_bands(fitted[0].estimated)
    table = tomllib.loads(rates.rates_as_toml(fitted) + rates.errors_as_toml(bands))
    assert table["v6e"]["compute_factor"] == 1.1
    assert table["v6e"]["kinds"]["flash_attention"]["turn_cycles"] == 200
    assert [error["kinds"] for error in table["errors"]] == [{"flash_attention": 24}]
    assert "hbm_efficiency" not in table["v6e"]  # that of all ops
    assert table["fitted_on"]["rows"] == sorted(f"r{number}" for number in range(24))


def test_the_shipped_rates_stand_on_the_rows_the_script_would_choose():
    chosen = {row.id for row in rates.spread(read_timings(TIMINGS).rows, 5)}
    assert rows_in_view("kernels") == chosen
    assert len(chosen) == 40


TABLES = tomllib.loads(
    (Path(rates.__file__).parents[1] / "src/tpukit/compiler/bundles/data/calibration.toml")
    .read_text("utf-8")
)  # fmt: skip
CHIPS = ("7x", "v5e", "v5p", "v6e")


@pytest.mark.parametrize("chip", CHIPS)
def test_the_shipped_constants_are_of_those_that_are_tried(chip):
    """Nobody has touched them up by hand."""
    fitted = TABLES[chip]
    for constants in (fitted, *fitted["kinds"].values()):
        assert constants["compute_factor"] in rates.COMPUTE_FACTORS
        assert constants["turn_cycles"] in rates.TURN_CYCLES
    if len(fitted["kinds"]) == 1:  # then all rows are of that kind
        assert [{**fitted, "kinds": {}}] == [
            {**own, "kinds": {}} for own in fitted["kinds"].values()
        ]


DOCUMENT = (Path(rates.__file__).parents[1] / "docs" / "kernels.md").read_text("utf-8")
KINDS = {
    "attention_fwd": "flash_attention",
    "attention_bwd": "flash_attention_backward",
    "linear_softmax_cross_entropy_fwd": "cross_entropy",
    "linear_softmax_cross_entropy_bwd": "cross_entropy_backward",
    "ragged_dot": "grouped_matmul",
}


def documented():
    """Kernels not in view and their median error, by chip and kind, of the table in the docs."""
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| (\d+) \((\d+)\) \| [\d.]+ %, ([\d.]+) % \|",
        DOCUMENT,
        re.MULTILINE,
    )
    return {
        (chip, KINDS[op]): (int(all_rows) - int(in_view), float(error) / 100)
        for op, chip, all_rows, in_view, error in rows
    }


def test_the_shipped_bands_are_of_the_kernels_that_the_documents_count():
    whole, kinds = {}, {}
    for row in TABLES["errors"]:
        if row["chip"] not in whole:
            whole[row["chip"]] = row["kinds"]
        else:
            ((kind, count),) = row["kinds"].items()
            kinds[row["chip"], kind] = row
            assert whole[row["chip"]][kind] == count
    made_of = re.search(r"The bands were made of (\d+) kernels that were not in view", DOCUMENT)
    assert sum(sum(counts.values()) for counts in whole.values()) == int(made_of[1])
    # Where the table has the same kernels, it has the same median.
    same = 0
    for (chip, kind), (count, error) in documented().items():
        if whole[chip][kind] == count and (chip, kind) in kinds:
            assert kinds[chip, kind]["median"] == pytest.approx(error, abs=0.0005)
            same += 1
    assert same == 4
    for row in TABLES["errors"]:
        assert row["median"] <= max(row["below"], row["above"])  # of nine in ten
