"""Scores of estimates: which rows are taken, what the figures mean, and one run end to end."""

import json
import statistics
from types import SimpleNamespace

import pytest
from measured_kernels import MeasuredRow, read_timings, score, score_timings
from measured_kernels.report import GroupScore, ScoredRow
from measured_kernels.rows import rows_in_view
from measured_kernels.score import newest, sample
from scipy.stats import spearmanr

from tpukit.errors import TPUValidationError, XLACompilationError
from tpukit.kernels.timing import ErrorBand, KernelEstimate


def row(number, us, *, impl="xla", op="matmul", size=None, device="v6e", date="", **more):
    size = number if size is None else size
    return MeasuredRow.model_validate(
        {
            "id": f"r{number}",
            "device": device,
            "op": op,
            "impl": impl,
            "dims": {"m": size},
            "shapes": {"a": [128 * (size + 1), 128], "b": [128, 128]},
            "dtypes": {"a": "bfloat16", "b": "bfloat16"},
            "measured_us": us,
            "timing_method": "xprof_device_span",
            "source_date": date,
        }
        | more
    )


def scored(one, estimate_us, *, band=None, in_view=False):
    low, high = band or (None, None)
    return ScoredRow(one, one.chip, None, estimate_us, low, high, in_view)


class TestFigures:
    def test_rank_and_errors_are_those_of_the_textbook(self):
        measured, estimated = [10.0, 20.0, 40.0, 80.0, 30.0], [11.0, 19.0, 30.0, 120.0, 33.0]
        rows = [
            scored(row(i, us), guess)
            for i, (us, guess) in enumerate(zip(measured, estimated, strict=True))
        ]
        found = GroupScore.of("matmul", "v6e", rows)
        errors = [abs(e - m) / m for e, m in zip(estimated, measured, strict=True)]
        assert found.spearman == pytest.approx(spearmanr(estimated, measured).statistic)
        assert found.median_error == pytest.approx(statistics.median(errors))
        assert found.mean_error == pytest.approx(sum(errors) / 5)
        assert (found.rows, found.cases, found.compared, found.banded) == (5, 5, 0, 0)

    def test_a_rank_of_two_or_of_equals_is_none(self):
        two = [scored(row(i, 10.0 + i), 1.0 + i) for i in range(2)]
        assert GroupScore.of("matmul", "v6e", two).spearman is None
        equal = [scored(row(i, 10.0), 1.0 + i) for i in range(4)]
        assert GroupScore.of("matmul", "v6e", equal).spearman is None

    def test_the_faster_is_named_where_both_were_measured(self):
        rows = [
            scored(row(0, 10.0, impl="pallas_a", size=0), 9.0),
            scored(row(1, 8.0, impl="pallas_b", size=0), 30.0),  # the fastest kernel counts
            scored(row(2, 12.0, impl="xla", size=0), 20.0),
            scored(row(3, 5.0, impl="pallas_a", size=1), 5.0),  # named wrong
            scored(row(4, 6.0, impl="xla", size=1), 4.0),
            scored(row(5, 6.0, impl="xla", size=2), 4.0),  # alone
        ]
        found = GroupScore.of("matmul", "v6e", rows)
        assert (found.compared, found.named_right) == (2, 1)

    def test_measured_times_outside_the_band_are_counted(self):
        rows = [
            scored(row(0, 10.0), 11.0, band=(9.0, 12.0)),
            scored(row(1, 10.0), 11.0, band=(10.5, 12.0)),
            scored(row(2, 10.0), 11.0),
        ]
        found = GroupScore.of("matmul", "v6e", rows)
        assert (found.banded, found.in_band) == (2, 1)


class TestWhichRows:
    def test_of_one_program_the_newest_row_counts(self):
        rows = [row(2, 5.0, size=1, date="2026-03"), row(1, 9.0, size=1, date="2026-01")]
        kept, left_out = newest([*rows, row(3, 7.0, size=4)])
        assert {one.id for one in kept} == {"r2", "r3"}
        assert [(one.id, one.reason) for one in left_out] == [
            ("r1", "the same program was measured again later")
        ]

    def test_other_blocks_are_another_program(self):
        rows = [row(1, 5.0, size=1), row(2, 6.0, size=1, config={"tile": 8})]
        assert len(newest(rows)[0]) == 2

    def test_a_sample_is_spread_and_always_the_same(self):
        rows = [row(i, float(100 - i)) for i in range(50)]
        chosen = [one.measured_us for one in sample(rows, 3)]
        assert chosen == [51.0, pytest.approx(75, abs=1), 100.0]
        assert sample(rows[::-1], 3) == sample(rows, 3)
        assert sample(rows, 100) == sample(rows, None)
        assert len(sample(rows, None)) == 50

    def test_a_sample_has_both_sides_where_both_were_measured(self):
        alone = [row(i, 10.0 + i) for i in range(40)]
        pair = [row(100, 5.0, size=99), row(101, 6.0, size=99, impl="pallas_a")]
        assert {"r100", "r101"} <= {one.id for one in sample([*alone, *pair], 1)}


def test_rows_in_view_are_rows_of_the_shipped_file():
    assert len(rows_in_view("kernels")) == 40
    assert len(rows_in_view("ops")) > 300
    assert not rows_in_view("kernels") & rows_in_view("ops")


@pytest.fixture
def doubled(monkeypatch):
    """Every estimate is twice the measured time, known from the size alone; one is refused."""

    def profile(function, arguments, chip, **_):
        rows = arguments[0].shape[0]
        if rows == 128 * 4:
            raise XLACompilationError("too much\n  of everything.")
        return SimpleNamespace(rows=rows, chip=chip)

    def timed(profile, *, kind):
        seconds = 2e-6 * profile.rows
        return KernelEstimate(
            name="made up", chip=profile.chip, kind=kind, time_s=seconds, kernel_s=seconds,
            surrounding_s=0.0, error=ErrorBand(0.1, 0.2, 0.3, {kind: 7}), calls={}, times={},
            bundle_count=10,
        )  # fmt: skip

    monkeypatch.setattr(score, "profile_kernel", profile)
    monkeypatch.setattr(score, "time_profile", timed)


@pytest.fixture
def timings(tmp_path):
    rows = [row(i, 128.0 * (i + 1)) for i in range(5)]
    rows += [row(10, 7.0, impl="pallas_a"), row(11, 7.0, device="v9z"), row(12, 1.0, op="copy")]
    data = [one.model_dump(mode="json") for one in rows]
    path = tmp_path / "timings.json"
    path.write_text(json.dumps([*data, {"id": "broken"}]))
    return path


class TestARun:
    def test_every_row_is_scored_or_named(self, doubled, timings):
        lines = []
        found = score_timings(read_timings(timings), progress=lines.append)
        assert {one.row.id for one in found.scored} == {"r0", "r1", "r2", "r4"}
        assert found.total.median_error == pytest.approx(1.0)
        reasons = {one.id: one.reason for one in found.left_out}
        assert reasons["broken"] == "device: field required"
        assert reasons["r3"] == "too much of everything"
        assert reasons["r10"] == reasons["r12"] == "its source is not available"
        assert "'v9z' is not a TPU generation" in reasons["r11"]
        assert found.reasons["its source is not available"] == {
            "matmul as pallas_a": 1,
            "copy as xla": 1,
        }
        assert len(found.scored) + len(found.left_out) == found.rows_in_file == 9
        assert [(line.done, line.total) for line in lines] == [(i, 8) for i in range(1, 9)]
        assert "matmul as xla on v6e (m 0): 2.00 of measured" in lines

    def test_the_same_rows_give_the_same_answer_with_any_number_of_workers(self, doubled, timings):
        read = read_timings(timings)
        first = score_timings(read, workers=1).to_dict()
        assert score_timings(read, workers=4).to_dict() == first
        assert json.loads(json.dumps(first)) == first

    def test_ops_and_chips_choose_rows(self, doubled, timings):
        read = read_timings(timings)
        assert len(score_timings(read, ops=["matmul"], chips=["v6e"], limit=2).scored) == 2
        with pytest.raises(TPUValidationError, match=r"has copy, matmul\. Did you mean 'matmul'"):
            score_timings(read, ops=["matmull"])
        with pytest.raises(TPUValidationError, match="no row of those ops was measured on v5e"):
            score_timings(read, ops=["matmul"], chips=["v5e"])

    def test_a_program_in_view_by_an_older_row_is_in_view(self, doubled, tmp_path):
        known = sorted(rows_in_view("ops"))[0]
        rows = [
            row(1, 128.0, size=0, date="2026-01").model_copy(update={"id": known}),
            row(2, 128.0, size=0, date="2026-05"),
            row(3, 256.0, size=1),
        ]
        path = tmp_path / "t.json"
        path.write_text(json.dumps([one.model_dump(mode="json") for one in rows]))
        found = score_timings(read_timings(path))
        assert {one.row.id: one.in_view for one in found.scored} == {"r2": True, "r3": False}
        assert found.total_unseen.rows == 1
