"""Every op compiles for every generation, and no kernel has grown by more than a twentieth."""

import json
from pathlib import Path

import pytest

from tpukit.errors import TPUError
from tpukit.kernels.registry.registry import builtin_ops, get_tpu_op
from tpukit.kernels.timing import count_bundles

COUNTS = json.loads((Path(__file__).parent / "bundle_counts.json").read_text())
CHIPS = ("v5e", "v5p", "v6e", "7x")
GROWTH = 1.05
RENEW = "python benchmarks/kernels.py bundles --write"


def test_every_op_is_counted_on_every_generation():
    assert sorted(COUNTS) == sorted(builtin_ops()), f"run {RENEW}"
    assert all(tuple(kept["bundles"]) == CHIPS for kept in COUNTS.values())


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", sorted(COUNTS))
def test_kernels_compile_and_do_not_grow(name, chip):
    kept = COUNTS[name]
    op, before = get_tpu_op(name), kept["bundles"][chip]
    if isinstance(before, str):
        with pytest.raises(TPUError):
            count_bundles(op, op.case(kept["case"]), chip, direction=kept["direction"])
        return
    now = count_bundles(op, op.case(kept["case"]), chip, direction=kept["direction"])
    assert sorted(now) == sorted(before), f"other kernels than before; run {RENEW}"
    grown = {
        kernel: (before[kernel], bundles)
        for kernel, bundles in now.items()
        if bundles > before[kernel] * GROWTH
    }
    assert not grown, f"{name} on {chip} grew (before, now): {grown}; mend it, or run {RENEW}"
