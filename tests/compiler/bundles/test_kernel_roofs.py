"""No kernel is credited with more than the chip can do: its peak, and what a copy reached."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.compiler.bundles import CallTrace, calibration_of, describe_band, error_of
from tpukit.compiler.bundles.core_run import GRANULE_BYTES, CoreRun, Transfer
from tpukit.compiler.bundles.trace import CallRates, _tables, error_bands_of
from tpukit.compiler.bundles.units import core_of
from tpukit.compiler.timeline.machine import Machine
from tpukit.hardware import get_chip
from tpukit.hardware.slice import list_slices

CHIPS = ("v5e", "v5p", "v6e", "7x")
KINDS = sorted({kind for chip in CHIPS for kind in _tables()[chip].get("kinds", {})})
CONSTANTS = list(itertools.product(CHIPS, (None, *KINDS)))
# Rows of a register that one product takes, by the bits of a number.
ROWS = {"bf16": 16, "int8": 32, "fp8": 32}
FORMATS = {"bf16": "bf16", "int8": "s8", "fp8": "f8e5m2"}


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        *itertools.product(["v5e", "v5p", "v6e"], ["bf16", "int8"]),
        ("v6e", "fp8"),  # the others have no unit for it
    ],
)
def test_products_at_the_pace_the_compiler_counts_are_the_stated_peak(chip, name):
    """The data sheet's peak and the compiler's spacing are two sources of one number."""
    target, core = get_chip(chip), core_of(chip)
    names = [one for one in core.matrix_spacing if FORMATS[name].startswith(one)]
    spacing = core.matrix_spacing[max(names, key=len, default="default")]
    a_cycle = 2 * ROWS[name] / spacing * target.mxu_size.value**2 * core.slots["MXU"]
    counted = a_cycle * target.clock_ghz.value * 1e9 * target.cores_per_chip
    assert counted == pytest.approx(target.peak(name).value * 1e12, rel=0.003)


def test_tpu7x_states_a_peak_above_its_compilers_clock():
    rates = calibration_of("7x").rates(get_chip("7x"))
    assert rates.product_factor == pytest.approx(1.9 / 2.2, rel=0.001)


@pytest.mark.parametrize(("chip", "kind"), CONSTANTS)
def test_kernels_and_ops_move_bytes_at_one_rate_no_faster_than_a_measured_copy(chip, kind):
    target = get_chip(chip)
    reached = calibration_of(chip, kind).rates(target).hbm_bytes_per_s
    op = Machine.of(list_slices(chip)[0], op_time_in_a_step=1.0)
    assert reached == pytest.approx(1 / op.hbm_s(1.0))
    stated = target.per_device(target.hbm_gbps).value * 1e9
    assert reached < stated
    copied = target.measured.get("hbm_copy_gbps")
    if copied is not None:
        assert reached == pytest.approx(copied.value * 1e9 / target.devices_per_chip, rel=0.005)


@st.composite
def runs(draw):
    """A core that starts transfers, waits for some of them, and multiplies."""
    cycles = draw(st.integers(1, 10**7))
    sizes = draw(st.lists(st.integers(1, 10**5), max_size=20))
    waited = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    transfers = []
    for number, (granules, is_waited) in enumerate(zip(sizes, waited, strict=True)):
        at = cycles * number // (len(sizes) + 1)
        direction = "in" if number % 2 else "out"
        transfers.append(Transfer(at, number, granules, direction))
        if is_waited:
            transfers.append(Transfer(at, number, granules, "wait"))
    products = draw(st.integers(0, 8 * cycles))
    return CoreRun(
        bundles=cycles, compute_cycles=cycles, busy={"MXU": products}, waits={},
        product_cycles=products, loop_turns=draw(st.integers(0, 100)), transfers=transfers,
    )  # fmt: skip


@given(runs(), st.sampled_from(CONSTANTS))
def test_no_kernel_exceeds_the_peak_or_a_copy(run, constants):
    chip, kind = constants
    target, core = get_chip(chip), core_of(chip)
    trace = CallTrace("kernel", chip, 1, (run,) * target.cores_per_device)
    rates = calibration_of(chip, kind).rates(target)
    found = trace.estimate(rates)
    moved = sum(one.granules for one in run.transfers if one.direction in ("in", "out"))
    moved *= GRANULE_BYTES * target.cores_per_device
    assert moved / found.time_s <= rates.hbm_bytes_per_s * (1 + 1e-9)
    assert found.utilisation["HBM"] <= 1 + 1e-9
    per_cycle = 2 * 16 / core.matrix_spacing["default"] * target.mxu_size.value**2
    flops = per_cycle * run.product_cycles * target.cores_per_device
    peak = target.per_device(target.peak("bf16")).value * 1e12
    assert flops / found.time_s <= peak * (1 + 1e-9)


@given(runs())
def test_a_trace_is_read_as_it_was_written(run):
    trace = CallTrace("kernel", "v6e", 7, (run,))
    found = CallTrace.from_data(json.loads(json.dumps(trace.to_data())))
    rates = calibration_of("v6e").rates(get_chip("v6e"))
    assert found.estimate(rates) == trace.estimate(rates)
    assert (found.name, found.chip, found.bundle_count) == ("kernel", "v6e", 7)


def test_a_kernel_takes_as_long_as_its_slowest_core():
    def run(cycles):
        return CoreRun(
            bundles=cycles, compute_cycles=cycles, busy={"MXU": 800}, waits={}, product_cycles=800,
            loop_turns=0, transfers=(),
        )  # fmt: skip

    rates = calibration_of("v5p").rates(get_chip("v5p"))
    both, slow = (
        CallTrace("kernel", "v5p", 1, cores).estimate(rates)
        for cores in ((run(10_000), run(50_000)), (run(50_000),))
    )
    assert both.cycles == slow.cycles
    assert both.issued_bundles == 50_000
    assert both.utilisation["MXU"] == pytest.approx(800 / 4 / slow.cycles)
    assert both.utilisation["EUP"] == both.utilisation["HBM"] == 0.0
    assert both.bound == "latency"  # no unit is used half of the time


RATES = CallRates(
    clock_hz=1e9,
    hbm_bytes_per_s=64e9,  # two granules a cycle
    transfer_latency_s=100e-9,
    transfer_issue_cycles=7,
    compute_factor=2,
    product_factor=1.5,
    turn_cycles=10,
    launch_s=1e-6,
)


def core_run(*transfers, products=2_000, turns=3):
    return CoreRun(
        bundles=900, compute_cycles=1_000, busy={"MXU": products, "VALU": 400}, waits={},
        product_cycles=products, loop_turns=turns, transfers=transfers,
    )  # fmt: skip


FETCH = (Transfer(0, 1, 50, "in"), Transfer(10, 1, 50, "wait"))
UNWAITED = (Transfer(0, 1, 10_000, "out"),)


@pytest.mark.parametrize(
    ("cores", "cycles", "stalled", "overhead", "moved"),
    [
        # The core computes 2,000 cycles, starts for 7, turns for 30 and is launched for 1,000. Both
        # cores fetch 50 granules, one a cycle each, there at 150; the wait comes at 20 + 7.
        ((core_run(*FETCH), core_run(*FETCH)), 3_160, 123, 1_037, 3_200),
        # The other fetches nothing, so that this one has both granules of a cycle: there at 125.
        ((core_run(*FETCH), core_run()), 3_135, 98, 1_037, 1_600),
        # 8,000 cycles of products on four units, half as long again as counted: 3,000, not 2,000.
        ((core_run(products=8_000),), 4_030, 0, 1_030, 0),
        # What nobody waits for is moved all the same, two granules a cycle.
        ((core_run(*UNWAITED),), 5_000, 0, 1_037, 320_000),
    ],
)
def test_a_call_takes_what_is_counted_by_hand(cores, cycles, stalled, overhead, moved):
    found = CallTrace("kernel", "v5p", 1, cores).estimate(RATES)
    assert found.cycles == pytest.approx(cycles)
    assert found.time_s == pytest.approx(cycles * 1e-9)
    assert found.stall_cycles == pytest.approx(stalled)
    assert found.overhead_cycles == pytest.approx(overhead)
    assert found.hbm_bytes == moved
    assert found.utilisation["VALU"] == pytest.approx(400 / 4 / cycles)
    own = sum(one.granules for one in cores[0].transfers if one.direction != "wait")
    sharing = sum(bool(core.transfers) for core in cores) or 1
    assert found.utilisation["HBM"] == pytest.approx(own * sharing / 2 / cycles)


@pytest.mark.parametrize(("products", "bound"), [(2_000, "MXU"), (1_999, "latency")])
def test_a_unit_bounds_a_kernel_from_half_of_its_time_on(products, bound):
    plain = replace(RATES, compute_factor=1, product_factor=1, launch_s=0.0)
    run = core_run(products=products, turns=0)  # 1,000 cycles and nothing beside them
    found = CallTrace("kernel", "v5p", 1, (run,)).estimate(plain)
    assert (found.cycles, found.bound) == (1_000, bound)


class TestBands:
    def test_a_kind_that_was_measured_enough_has_its_own(self):
        band = error_of("v6e", "flash_attention")
        assert list(band.kinds) == ["flash_attention"]
        assert describe_band(band, "flash_attention").endswith("flash_attention measured)")

    @pytest.mark.parametrize("chip", CHIPS)
    def test_a_kind_that_nobody_measured_says_so_and_names_those_that_were(self, chip):
        band = error_of(chip, "rms_norm")
        said = describe_band(band, "rms_norm")
        assert said.startswith("not known: no rms_norm measured (")
        assert all(f"{count} {kind}" in said for kind, count in band.kinds.items())
        assert sum(band.kinds.values()) == band.rows
        assert all(band.kinds.keys() >= one.kinds.keys() for one in error_bands_of(chip))

    def test_without_any_measured_kernel_nothing_is_known(self):
        assert error_of("v4", "rms_norm") is None
        assert describe_band(None, "rms_norm") == "not known: none measured"
