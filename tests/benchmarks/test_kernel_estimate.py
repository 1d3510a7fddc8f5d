import json
from types import SimpleNamespace

from measured_kernels import MeasuredRow, TimingsScore
from measured_kernels.report import ScoredRow

import kernels


def scored(number, estimate_us, *, impl="xla", size=None):
    size = number if size is None else size
    row = MeasuredRow.model_validate(
        {
            "id": f"r{number}{impl}",
            "device": "v6e",
            "op": "matmul",
            "impl": impl,
            "dims": {"m": size},
            "shapes": {},
            "measured_us": 10.0 * (number + 1),
        }
    )
    return ScoredRow(row, "v6e", None, estimate_us, None, None, in_view=False)


def score(*rows):
    return TimingsScore("file", len(rows), None, rows, ())


def test_the_shipped_rows_are_where_the_script_looks():
    assert kernels.TIMINGS.exists()


def test_a_rank_of_exactly_the_target_meets_it():
    estimates = (10.0, 20.0, 40.0, 30.0, 50.0)  # two neighbours swapped: 0.9 as ranks go
    rank, error = kernels.claims(score(*(scored(i, us) for i, us in enumerate(estimates))))
    assert rank.value == 0.9
    assert str(rank).endswith("met")
    assert error.value == 0.0


def test_groups_of_few_cases_are_not_judged_and_the_faster_is():
    pair = (scored(0, 10.0, size=1), scored(1, 5.0, impl="pallas_a", size=1))
    (named,) = kernels.claims(score(*pair))
    assert named.value == 0.0
    assert str(named).endswith("MISSED")


def test_the_script_scores_the_rows_of_a_file(monkeypatch, tmp_path, capsys):
    timings = tmp_path / "timings.json"
    row = {"id": "r", "device": "v6e", "op": "riddle", "impl": "xla", "shapes": {}}
    timings.write_text(json.dumps([row | {"measured_us": 1.0}]))
    monkeypatch.setattr("kernels.configure_tpu_environment", lambda: None)
    options = SimpleNamespace(timings=timings, only=[], on=[], limit=3, all=False)
    assert kernels.run_estimate(options) == 0
    said = capsys.readouterr().out
    assert "against measured kernels" in said
    assert "riddle as xla" in said
