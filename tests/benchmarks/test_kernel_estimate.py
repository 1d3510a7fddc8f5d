import json
from pathlib import Path

import kernel_estimate
import pytest
from kernel_rows.scoring import Score
from scipy.stats import spearmanr


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    path = tmp_path_factory.mktemp("scores") / "scores.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["kernel_estimate.py", "--json", str(path)])
        assert kernel_estimate.main() == 0
    return json.loads(path.read_text())


def test_every_op_with_enough_shapes_meets_both_bars(scored):
    judged = [score for score in scored["scores"] if score["bars_met"] is not None]
    assert len(judged) >= 12
    assert [score for score in judged if not score["bars_met"]] == []


def test_the_faster_implementation_is_named_on_every_device(scored):
    totals = {one["device"]: one for one in scored["named_right"] if one["op"] == "all"}
    assert totals.keys() == {"v5e", "v5p", "v6e", "tpu7x"}
    assert all(one["share"] >= 0.9 for one in totals.values())


def test_rows_left_out_are_counted_with_their_reason(scored):
    assert len(scored["rows"]) + sum(scored["left_out"].values()) == 2282
    assert any("exchange inside" in reason for reason in scored["left_out"])


def test_the_shipped_rows_are_where_the_script_looks():
    assert Path(kernel_estimate.DEFAULT_TIMINGS).exists()


def test_a_rank_of_exactly_the_bar_meets_it():
    rank = float(spearmanr([1, 2, 3, 4, 5], [1, 2, 4, 3, 5]).statistic)
    assert rank < 0.9
    assert Score("v6e", "attention_fwd", "", 5, 5, rank, 0.016).bars_met
    assert not Score("v6e", "attention_fwd", "", 5, 5, 0.89, 0.016).bars_met
