"""A file of measured kernels is scored with real compiles."""

import json

import pytest
from measured_kernels import read_timings, score_timings

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]


@pytest.mark.slow
def test_three_rows_are_scored_end_to_end(attention_row, tmp_path):
    product = {
        "id": "m1",
        "device": "tpu7x",
        "op": "matmul",
        "impl": "xla",
        "dims": {"m": 4096, "k": 4096, "n": 4096},
        "shapes": {"a": [4096, 4096], "b": [4096, 4096], "out": [4096, 4096]},
        "dtypes": {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"},
        "measured_us": 155.0,  # published: 77 % of the peak of one core
        "timing_method": "published_throughput_device_trace",
    }
    rows = [
        attention_row(),
        attention_row(id="a2", impl="xla", config={}),
        product,
        attention_row(id="a3", impl="pallas_mosaic_tpu_v2"),
    ]
    path = tmp_path / "timings.json"
    path.write_text(json.dumps(rows))
    data = score_timings(read_timings(path)).to_dict()
    estimates = {row["id"]: row["estimate_us"] for row in data["rows"]}
    assert not [row for row in data["left_out"] if row["id"] != "a3"]
    assert estimates.keys() == {"a1", "a2", "m1"}
    # No faster than the stated peak and bandwidth allow, and a product is not far from published.
    assert estimates["m1"] == pytest.approx(155.0, rel=0.15)
    arrays_us = 4 * 2 * 256 * 2 * 128 * 2 / 1640e9 * 1e6
    assert min(estimates["a1"], estimates["a2"]) > arrays_us
    groups = {(group["op"], group["chip"]): group for group in data["groups"]}
    assert groups["attention_fwd", "v6e"]["compared"] == 1
    assert [(row["id"], row["what"]) for row in data["left_out"]] == [
        ("a3", "attention_fwd as pallas_mosaic_tpu_v2")
    ]
    assert data["compares"] == {"estimate": "model", "measured": "measured"}
