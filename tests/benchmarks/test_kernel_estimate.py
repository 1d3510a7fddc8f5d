import json

import kernel_estimate
import pytest

from tpukit.kernels.timing.measured import MeasuredRow, TimingsScore
from tpukit.kernels.timing.measured.report import ScoredRow


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
    assert kernel_estimate.DEFAULT_TIMINGS.exists()


def test_a_rank_of_exactly_the_target_meets_it():
    estimates = (10.0, 20.0, 40.0, 30.0, 50.0)  # two neighbours swapped: 0.9 as ranks go
    rank, error = kernel_estimate.claims(score(*(scored(i, us) for i, us in enumerate(estimates))))
    assert rank.value == 0.9
    assert str(rank).endswith("met")
    assert error.value == 0.0


def test_groups_of_few_cases_are_not_judged_and_the_faster_is():
    pair = (scored(0, 10.0, size=1), scored(1, 5.0, impl="pallas_a", size=1))
    (named,) = kernel_estimate.claims(score(*pair))
    assert named.value == 0.0
    assert str(named).endswith("MISSED")


def test_the_script_runs_the_product_and_writes_its_scores(monkeypatch, tmp_path, capsys):
    timings, out = tmp_path / "timings.json", tmp_path / "scores.json"
    row = {"id": "r", "device": "v6e", "op": "riddle", "impl": "xla", "shapes": {}}
    timings.write_text(json.dumps([row | {"measured_us": 1.0}]))
    words = ["kernel_estimate.py", "--timings", str(timings), "--json", str(out)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernel_estimate.configure_tpu_environment", lambda: None)
        assert kernel_estimate.main() == 0
    assert "against measured kernels" in capsys.readouterr().out
    assert json.loads(out.read_text())["left_out"][0]["what"] == "riddle as xla"
