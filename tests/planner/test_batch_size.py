"""The batch size finder: its search on invented memory curves, and once on the real compiler."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit import Slice, Workload, compile_for, list_chips, list_slices
from tpukit.errors import TPUOutOfMemoryError, TPUValidationError
from tpukit.planner.batch_size import Probe, _search, _slice, find_optimal_batch_size

V6E = Slice.parse("v6e-8")


def searched(sizes, limit, per_step=8, seconds=None):
    """Search a curve given as bytes, and seconds of a step, for 1, 2, … examples a device."""

    def probe(examples):
        each = examples // per_step
        used = sizes[each - 1] if each <= len(sizes) else 10**9
        taken = seconds(each) if seconds is not None and used <= limit else None
        return Probe(examples, used, used <= limit, "", taken, None if taken is None else 0.5)

    return _search(probe, V6E, limit, per_step=per_step)


def test_the_fastest_that_fits_wins():
    slower = searched([10, 20, 30, 40, 50, 60, 70], 55, seconds=lambda each: 1.0 + each**2)
    assert slower == 1 * 8  # 8 examples in 2 s; 16 take 5
    faster = searched([10, 20, 30, 40, 50, 60, 70], 55, seconds=lambda each: 1.0 + each)
    assert faster == 5 * 8
    assert faster.mfu == 0.5
    chosen = max(faster.probes, key=lambda probe: probe.examples_per_s or 0)
    assert chosen.batch_size == faster
    assert chosen.to_dict()["examples_per_s"] == pytest.approx(40 / 6)


def test_batches_are_doubled_no_further_than_they_gain():
    found = searched([1] * 4096, 55, seconds=lambda each: max(8, each))
    assert found == 8 * 8
    assert max(probe.batch_size for probe in found.probes) == 32 * 8


def test_the_largest_that_fits():
    found = searched([10, 20, 30, 40, 50, 60, 70], 55)
    assert found == 5 * 8
    assert found.utilization == pytest.approx(50 / 55)
    assert {probe.batch_size for probe in found.probes} >= {8, 40, 48}
    assert found.to_dict()["origin"] == "compiler"


def test_a_larger_batch_that_needs_less_is_found():
    # 5 a device does not fit and 6 does, as a compiler's choices may have it.
    assert searched([10, 20, 30, 40, 60, 50, 70], 55) == 6 * 8


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 100))
def test_an_answer_always_fits_and_is_at_least_what_doubling_finds(sizes, limit):
    try:
        found = searched(sizes, limit)
    except TPUOutOfMemoryError:
        assert sizes[0] > limit
        return
    assert sizes[found // 8 - 1] <= limit
    doubling = 1
    while doubling * 2 <= len(sizes) and all(
        sizes[2**k - 1] <= limit for k in range(doubling.bit_length() + 1)
    ):
        doubling *= 2
    assert found >= doubling * 8


def test_memory_names_a_slice():
    assert str(_slice(None, 32 * 64)) == "v6e-64"
    assert str(_slice("v5p-8", None)) == "v5p-8"
    with pytest.raises(TPUValidationError, match="which chips"):
        _slice(None, None)
    for none in (0, -7, math.inf, math.nan):
        with pytest.raises(TPUValidationError, match=r"give the memory of all chips"):
            _slice(None, none)


ALL_GB = [
    chip.hbm_bytes.value * on.chips / 1e9
    for chip in list_chips()
    if chip.rules and chip.hbm_bytes.value
    for on in list_slices(chip.name)
]


@given(st.floats(1e-3, 1e9))
def test_any_amount_of_memory_names_the_smallest_slice_that_has_it(memory_gb):
    found = _slice(None, memory_gb)
    held_gb = found.chip.hbm_bytes.value * found.chips / 1e9
    assert held_gb >= 0.98 * min(memory_gb, max(ALL_GB))
    # GB may mean 2³⁰ bytes: 7 % more than 10⁹.
    assert not [size for size in ALL_GB if memory_gb <= size < held_gb / 1.1]


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_on_the_real_compiler():
    two = Workload("tiny", batch_size=2, sequence_length=128, remat="none")
    taken = compile_for(two, "v6e-1", mesh={"fsdp": 1}, until="memory").memory.total_bytes
    found = find_optimal_batch_size(
        two,
        128,
        target_utilization=1.0,
        available_memory_gb=taken / 1e9,
        on="v6e-1",
    )
    used = {probe.batch_size: probe.bytes_per_device for probe in found.probes}
    assert used[int(found)] <= found.limit_bytes
    assert used[int(found) + 1] > found.limit_bytes
    assert 0.5 < found.utilization <= 1
    assert all(0 < probe.mfu < 1 for probe in found.probes if probe.fits)
    with pytest.raises(TPUOutOfMemoryError, match="not even 1 examples"):
        find_optimal_batch_size("tiny", 128, available_memory_gb=1e-6, on="v6e-1", remat="none")
