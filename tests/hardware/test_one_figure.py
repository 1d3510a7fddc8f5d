"""Figures that more than one part counts with have one home, and missing ones a bound."""

import pytest

from tpukit.compiler.timeline.machine import Machine
from tpukit.hardware import Slice, get_chip, list_chips
from tpukit.hardware.catalog import dcn_rate
from tpukit.planner.planning import plan


@pytest.mark.parametrize(
    ("generation", "device_gbps"),
    # PCI Express 3 with 16 lanes, and 5 on v6e; version 4 for each device of TPU7x.
    [("v4", 14), ("v5e", 14), ("v5p", 14), ("v6e", 56), ("7x", 28)],
)
def test_the_host_link_of_the_catalog_is_the_one_counted_with(generation, device_gbps):
    chip = get_chip(generation)
    target = Slice.of(generation, chips=8)
    assert chip.per_device(chip.pcie_gbps).value == device_gbps
    assert Machine.of(target).host_bytes_per_s == device_gbps * 1e9


@pytest.mark.parametrize("chip", list_chips(), ids=str)
def test_bytes_between_slices_always_have_a_rate(chip):
    rate = dcn_rate(chip)
    assert rate.value > 0
    if chip.dcn_gbps.value is None:
        known = [one.dcn_gbps.value for one in list_chips() if one.dcn_gbps.value is not None]
        assert rate.value == min(known)
        assert rate.origin == "model"
        assert "the slowest known" in rate.source
    else:
        assert rate is chip.dcn_gbps


@pytest.mark.parametrize("generation", ["v3", "v4"])
def test_slices_that_are_joined_take_longer_and_the_plan_says_by_which_rate(generation):
    name = {"v3": "v3-512", "v4": "v4-512"}[generation]
    asked = {"tokens": 1e10, "sequence_length": 2048, "verify": 0}
    apart = plan("llama3.1-8b", on=name, **asked).best
    joined = plan("llama3.1-8b", on=f"2x{name}", **asked)
    assert joined.best.seconds_by_cause["dcn"] > 0
    assert joined.best.tokens_per_s_per_chip < apart.tokens_per_s_per_chip
    assert any(f"between {generation} slices" in line for line in joined.assumptions)
