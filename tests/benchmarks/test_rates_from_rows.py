"""Fitted rates found again from the published rows they were fitted on; nothing is compiled."""

import gzip
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

import plan
import pytest
from published_programs import GroupedProduct, measured_products
from published_rows import NotExpressible, as_run, load_rows

from tpukit.hardware import get_chip
from tpukit.hardware.rates import AttentionRates, ChipRates

DATA = Path(plan.__file__).parent / "data"


@pytest.fixture(scope="module")
def runs():
    found = []
    for row in load_rows(DATA / "published_results.json"):
        try:
            found.append(as_run(row, quantized=True))
        except NotExpressible:
            continue
    return found


# Modelled over published step, in the mean of each generation's rows, as scored on 2026-11-17.
STEPS = {
    "v4": (2, 0.934),
    "v5e": (12, 1.050),
    "v5p": (10, 1.002),
    "v6e": (20, 0.984),
    "7x": (7, 1.026),
}


@pytest.mark.parametrize("generation", STEPS)
def test_published_steps_are_met_as_nearly_as_stated(generation, runs):
    own = [
        math.log(plan.model(run).step_time_s / run.step_time_s)
        for run in runs
        if run.slice.chip.name == generation
    ]
    rows, mean = STEPS[generation]
    assert len(own) == rows
    assert math.exp(statistics.fmean(own)) == pytest.approx(mean, abs=0.001)


def test_the_planner_is_off_by_what_the_documents_say(runs):
    off = [abs(plan.model(run).off) for run in runs]
    assert len(off) == 51
    assert statistics.median(off) == pytest.approx(0.0491, abs=0.0005)
    assert max(off) == pytest.approx(0.144, abs=0.001)


def test_waiting_for_other_slices_is_the_median_of_runs_on_fewer_and_more(runs):
    alike = defaultdict(list)
    for run in runs:
        work, on = run.workload, run.slice
        devices = on.devices
        key = (str(work.config), work.batch_size / devices, on.chip.name, on.chips_per_slice,
               run.precision, str(work.remat))  # fmt: skip
        alike[key].append((on.num_slices, run.step_time_s))
    waits = []
    for members in alike.values():
        (fewest, fast), *more = sorted(members)
        waits += [
            (seconds / fast - 1) / math.log2(slices / fewest)
            for slices, seconds in more
            if slices > fewest
        ]
    assert len(waits) == 10
    assert ChipRates.of().wait_per_doubling == pytest.approx(statistics.median(waits), abs=0.001)


ATTENTION = json.loads(gzip.decompress((DATA / "kernel_timings.json.gz").read_bytes()))
# What ops reached when the transposes around the kernels were taken off.
HBM_THEN = 0.87


def share_of_peak(row):
    """Of a row of splash attention without a mask, transposes around it taken off."""
    chip, dims = get_chip(row["device"]), row["dims"]
    rows = dims["batch"] * dims["q_len"] * dims["num_q_heads"]
    keys = dims["batch"] * dims["kv_len"] * dims["num_kv_heads"]
    widths = dims["head_dim_qk"] + dims["head_dim_v"]
    moved = 2 * 2 * (rows + keys) * widths
    hbm = chip.per_device(chip.hbm_gbps).value * 1e9 * HBM_THEN
    seconds = row["measured_us"] * 1e-6 - moved / hbm
    peak = chip.per_device(chip.peak("bf16")).value * 1e12
    return 2 * rows * dims["kv_len"] * widths / seconds / peak


@pytest.mark.parametrize(
    ("generation", "head"),
    [("v5p", 64), ("v5p", 256), ("v6e", 64), ("v6e", 128), ("v6e", 256), ("7x", 64), ("7x", 256)],
)
def test_attention_has_the_share_of_the_longest_measured_rows(generation, head):
    rows = [
        row
        for row in ATTENTION
        if row["op"] == "attention_fwd"
        and row["impl"] == "pallas_mosaic_tpu"
        and row["mask_kind"] == "none"
        and not row["static_args"].get("return_residuals")
        and get_chip(row["device"]).name == generation
        and row["dims"]["head_dim_qk"] == row["dims"]["head_dim_v"] == head
        and row["dims"]["kv_len"] >= 2048
    ]
    longest = max(row["dims"]["kv_len"] for row in rows)
    shares = [share_of_peak(row) for row in rows if row["dims"]["kv_len"] == longest]
    shipped = AttentionRates.of(generation).share(head, of_products=0.0)
    assert shipped == pytest.approx(statistics.fmean(shares), rel=0.085)


def test_v5e_has_the_shares_of_v5p_whose_matrix_units_it_has():
    shares = ("share_64", "share_128", "share_256")
    v5e, v5p = AttentionRates.of("v5e"), AttentionRates.of("v5p")
    assert [getattr(v5e, name) for name in shares] == [getattr(v5p, name) for name in shares]
    assert v5p.filling_head == 256  # the widest measured


STATIC = json.loads((DATA / "attention_static.json").read_text())


def best_us(chip, direction, kernel):
    start = f"{chip} causal_4096 {direction} {kernel} "
    return min(
        entry["time_us"]
        for label, entry in STATIC.items()
        if label.startswith(start) and "time_us" in entry
    )


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "7x"])
def test_jaxs_splash_takes_as_much_longer_as_its_bundles(chip):
    rates = AttentionRates.of(chip)
    shipped = {"forward": rates.jax_over_tokamax_forward,
               "backward": rates.jax_over_tokamax_backward}  # fmt: skip
    for direction, factor in shipped.items():
        # On v5p nobody measured tokamax's gradients, whose bundles are far slower: v5e's stand in.
        on = "v5e" if (chip, direction) == ("v5p", "backward") else chip
        ratio = best_us(on, direction, "jax splash") / best_us(on, direction, "tokamax")
        assert factor == pytest.approx(ratio, abs=0.016)


# Cycles that libtpu 0.0.42.1 states for rows x width x columns of bfloat16 and of int8.
PRODUCT_CYCLES = {
    "v5e": {
        (8192, 4096, 14336): (7_481_766, 3_739_488),
        (6144, 12288, 12288): (15_516_856, 7_282_493),
        (8192, 14336, 4096): (7_516_000, 3_795_233),
    },
    "v5p": {
        (8192, 4096, 14336): (4_347_200, 1_874_125),
        (6144, 12288, 12288): (7_611_826, 4_029_568),
        (8192, 14336, 4096): (3_954_200, 2067808),
    },
}


@pytest.mark.parametrize("chip", PRODUCT_CYCLES)
def test_products_reach_what_the_compilers_cycles_say(chip):
    target = get_chip(chip)
    clock = target.clock_ghz.value * 1e9

    def share(peak, sizes, cycles):
        return 2 * math.prod(sizes) / (cycles / clock) / (target.peak(peak).value * 1e12)

    cycles = PRODUCT_CYCLES[chip].items()
    plain = [share("bf16", sizes, bf16) for sizes, (bf16, _) in cycles]
    narrow = [share("int8", sizes, int8) for sizes, (_, int8) in cycles]
    rates = ChipRates.of(chip)
    assert rates.matrix_efficiency == pytest.approx(statistics.fmean(plain), rel=0.03)
    assert rates.streamed_matrix_efficiency == rates.matrix_efficiency
    gained = statistics.fmean(narrow) / statistics.fmean(plain)
    assert rates.int8_over_bf16 == pytest.approx(gained, rel=0.05)


@pytest.mark.parametrize(("chip", "cores"), [("v5e", 1), ("v5p", 2), ("v6e", 1), ("7x", 1)])
def test_grouped_products_reach_what_measured_ones_do(chip, cores):
    best: dict[GroupedProduct, float] = defaultdict(float)
    for one in measured_products(chip):
        product = one.product
        if product.bits == 16 and product.fills_lanes and product.rows >= 1024 * product.groups:
            best[product] = max(best[product], one.flops_per_s)
    target = get_chip(chip)
    peak = target.per_device(target.peak("bf16")).value * 1e12 / cores  # tokamax's kernel has one
    share = statistics.median(best.values()) / peak
    assert ChipRates.of(chip).grouped_efficiency == pytest.approx(share, abs=0.006)


def test_assumed_rates_are_the_ones_that_change_nothing():
    assert ChipRates.of().dcn_share == ChipRates.of().gathers_along_whole_torus == 1.0
    assert AttentionRates.of().jax_over_tokamax_forward == 1.0
    assert AttentionRates.of().jax_over_tokamax_backward == 1.0
