"""Measured programs timed by the rates in use: a rate that moves leaves the errors that are stated.

What the compiler made of them is kept (benchmarks/kernels.py keep), so nothing is compiled here.
"""

import gzip
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from tpukit.compiler.bundles import CallTrace, calibration_of
from tpukit.compiler.hlo import parse_hlo
from tpukit.compiler.kernel_traces import one_device_slice
from tpukit.hardware import get_chip
from tpukit.hardware.rates import ChipRates
from tpukit.kernels.timing import KernelProfile, time_profile

KEPT = Path(__file__).parent / "data" / "compiled_rows.json.gz"
# Kernels timed by what all kinds of a chip share, as those of a kind nobody measured are.
STATED_OF_ANY_KIND = {"v5e": 1.067, "v5p": 1.015, "v6e": 1.0, "7x": 0.989}
# Of each op: rows, median error, and the mean ratio of the estimate to the measured time.
STATED = {
    ("attention_bwd", "kernel", "7x"): (2, 0.083, 0.918),
    ("attention_bwd", "xla", "7x"): (2, 0.088, 0.912),
    ("attention_fwd", "kernel", "7x"): (3, 0.001, 0.976),
    ("attention_fwd", "kernel", "v5p"): (3, 0.015, 1.001),
    ("attention_fwd", "kernel", "v6e"): (4, 0.024, 1.000),
    ("attention_fwd", "xla", "7x"): (7, 0.162, 0.972),
    ("attention_fwd", "xla", "v5p"): (4, 0.172, 0.969),
    ("attention_fwd", "xla", "v6e"): (4, 0.292, 0.682),
    ("gated_linear_unit", "xla", "v5p"): (1, 0.075, 0.925),
    ("hbm_copy", "xla", "7x"): (2, 0.026, 1.023),
    ("linear_softmax_cross_entropy_bwd", "xla", "7x"): (2, 0.042, 1.041),
    ("linear_softmax_cross_entropy_fwd", "xla", "7x"): (2, 0.034, 0.966),
    ("linear_softmax_cross_entropy_fwd", "xla", "v6e"): (4, 0.045, 0.938),
    ("matmul", "xla", "7x"): (2, 0.165, 0.973),
    ("normalization_bwd", "xla", "7x"): (2, 0.515, 0.462),
    ("ragged_dot", "kernel", "7x"): (2, 0.117, 1.114),
    ("ragged_dot", "kernel", "v5e"): (1, 0.067, 1.067),
    ("ragged_dot", "kernel", "v5p"): (1, 0.058, 1.058),
    ("ragged_dot", "kernel", "v6e"): (2, 0.075, 1.073),
    ("ragged_dot", "xla", "7x"): (2, 48.250, 4.325),
    ("ragged_dot", "xla", "v5e"): (2, 0.613, 0.622),
    ("ragged_dot", "xla", "v5p"): (2, 0.730, 0.043),
    ("ragged_dot", "xla", "v6e"): (2, 0.244, 1.043),
    ("triangle_multiplication", "xla", "7x"): (2, 0.434, 0.566),
}


def profile_of(row):
    chip = get_chip(row["chip"])
    compiled = SimpleNamespace(
        name=row["op"],
        module=parse_hlo(row["hlo"]),
        slice=one_device_slice(chip),
        coordinates=((0, 0, 0),),
        slice_of_device=(0,),
    )
    calls = {name: CallTrace.from_data(call) for name, call in row["calls"].items()}
    return KernelProfile(chip, compiled, calls, {})


@pytest.fixture(scope="module")
def rows():
    return json.loads(gzip.decompress(KEPT.read_bytes()))


@pytest.fixture(scope="module")
def ratios(rows):
    found = defaultdict(list)
    for row in rows:
        estimate = time_profile(profile_of(row), kind=row["kind"])
        side = "kernel" if row["kind"] else "xla"
        found[row["op"], side, row["chip"]].append(estimate.time_s * 1e6 / row["measured_us"])
    return found


def test_every_group_of_rows_has_its_errors_stated(ratios):
    assert set(ratios) == set(STATED)


@pytest.mark.parametrize("group", STATED, ids=" ".join)
def test_measured_programs_are_met_as_nearly_as_stated(group, ratios):
    rows, median_error, mean_ratio = STATED[group]
    own = ratios[group]
    assert len(own) == rows
    assert statistics.median(abs(ratio - 1) for ratio in own) == pytest.approx(
        median_error, abs=0.002
    )
    mean = math.exp(statistics.fmean(map(math.log, own)))
    assert mean == pytest.approx(mean_ratio, abs=0.002)


@pytest.mark.parametrize("chip", STATED_OF_ANY_KIND)
def test_kernels_of_no_kind_are_met_as_nearly_as_stated(chip, rows):
    own = [
        time_profile(profile_of(row)).time_s * 1e6 / row["measured_us"]
        for row in rows
        if row["kind"] and row["chip"] == chip
    ]
    mean = math.exp(statistics.fmean(map(math.log, own)))
    assert mean == pytest.approx(STATED_OF_ANY_KIND[chip], abs=0.002)


@pytest.mark.parametrize("chip", ["v5e", "v6e", "7x"])
def test_a_kernel_is_launched_as_an_op_is_started(chip):
    assert calibration_of(chip).launch_s == ChipRates.of(chip).op_overhead_s
    assert calibration_of(chip).transfer_issue_cycles == 0.0  # nothing measured shows any
