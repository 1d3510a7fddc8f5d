"""Thinned series: the extremes, ends and gaps of what was thinned are all still there."""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import TPUValidationError
from tpukit.observe.runs import Run, find_runs
from tpukit.observe.runs.series import make_series, thin
from tpukit.records.metrics import MetricsFile

values = st.lists(st.one_of(st.floats(-1e9, 1e9), st.just(math.nan)), min_size=1, max_size=400).map(
    np.array
)


@settings(deadline=None)
@given(y=values, points=st.integers(8, 100))
def test_extremes_ends_and_gaps_are_kept(y, points):
    kept = thin(y, points)
    assert len(kept) <= max(points, 8)
    assert list(kept) == sorted(set(kept))
    assert kept[0] == 0
    assert kept[-1] == len(y) - 1
    seen = y[kept]
    if np.isfinite(y).any():
        assert np.nanmin(seen) == np.nanmin(y)
        assert np.nanmax(seen) == np.nanmax(y)
    assert np.isnan(seen).any() == np.isnan(y).any()


def test_one_spike_in_a_million_is_seen():
    y = np.zeros(1_000_000)
    y[777_777], y[3] = 9.0, np.nan
    series = make_series("loss", np.arange(len(y)), y, by="step", points=500)
    assert series.total == 1_000_000
    assert len(series) <= 500
    assert series.x[np.nanargmax(series.y)] == 777_777
    assert 3 in series.x[np.isnan(series.y)]
    assert series.to_dict()["y"].count(None) == 1


def test_a_silence_is_a_gap_over_time_and_none_over_steps():
    step = np.arange(100.0)
    time = np.where(step < 50, step, step + 3600)
    by_time = make_series("loss", time, step, by="time", points=1000)
    assert np.isnan(by_time.y).sum() == 1
    assert 50 < by_time.x[np.isnan(by_time.y)][0] < 3600
    assert not np.isnan(make_series("loss", step, step, by="step", points=1000).y).any()


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    return tmp_path


@pytest.fixture
def metrics(run_dir):
    file = MetricsFile(run_dir / "metrics.jsonl")
    yield file
    file.close()


def test_a_metric_that_a_line_does_not_speak_of_is_no_gap(run_dir, metrics):
    for step in range(1, 11):
        loss = math.inf if step == 4 else 1.0 / step
        metrics.write({"step": step, "loss": loss, "mfu": None, "time": 100.0 + step})
        if step % 5 == 0:
            metrics.write({"step": step, "eval_loss": 2.0 / step, "time": 100.5 + step})
    run = Run(run_dir)
    assert run.metrics() == ["loss", "mfu", "eval_loss"]
    loss = run.series("loss")
    assert loss.x.tolist() == list(range(1, 11))
    assert np.flatnonzero(np.isnan(loss.y)).tolist() == [3]
    evaluated = run.series("eval_loss", by="time")
    assert evaluated.x.tolist() == [105.5, 110.5]
    assert evaluated.y.tolist() == [0.4, 0.2]
    assert np.isnan(run.series("mfu").y).all()
    assert run.series("loss", start=3, end=6).total == 4


def test_a_roll_back_takes_back_what_was_read(run_dir, metrics):
    for step in range(1, 9):
        metrics.write({"step": step, "loss": float(step), "time": float(step)})
    run = Run(run_dir)
    assert len(run.series("loss")) == 8
    metrics.roll_back(5)
    metrics.write({"step": 6, "loss": 60.0, "time": 60.0})
    assert run.series("loss").y.tolist() == [1, 2, 3, 4, 5, 60]


def test_lines_that_are_damaged_or_odd_are_passed_over(run_dir):
    lines = [
        json.dumps({"step": 1, "loss": 1.5, "host": "a", "time": 1.0}),
        '{"step": 2, "lo',
        "[" * 100_000,
        "null",
        json.dumps({"step": 3, "loss": 10**400, "host": "b", "time": 3.0}),
        json.dumps({"step": 4, "loss": "four", "host": 7, "time": 4.0}),
        json.dumps({"step": 5, "loss": 5.5, "host": "c", "time": 5.0}),
        '{"step": 6, "loss": 6.5, "host": "d", "time": 6',
    ]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines))
    run = Run(run_dir)
    assert run.metrics() == ["loss"]
    series = run.series("loss")
    assert series.x.tolist() == [1, 3, 4, 5]
    assert series.to_dict()["y"] == [1.5, None, None, 5.5]


def test_a_metric_that_is_not_there_is_named_with_those_that_are(run_dir, metrics):
    metrics.write({"step": 1, "loss": 1.0, "time": 1.0})
    with pytest.raises(TPUValidationError, match=r"no metric 'los'; it has loss.*Did you mean"):
        Run(run_dir).series("los")


def test_runs_are_found_the_newest_first(tmp_path):
    for name in ("old", "new", "none"):
        (tmp_path / name).mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    (tmp_path / "new" / "run.json").write_text("{}")
    os.utime(tmp_path / "old" / "run.json", (1, 1))
    assert [run.name for run in find_runs(tmp_path)] == ["new", "old"]
    assert [run.name for run in find_runs(tmp_path / "old")] == ["old"]
    assert find_runs(tmp_path / "nowhere") == []
    with pytest.raises(TPUValidationError, match=r"run\.json is missing"):
        Run(tmp_path / "none")
