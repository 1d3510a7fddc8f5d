"""VMEM: what a chip has, what blocks take, and which ones fit."""

import dataclasses

import jax
import pytest

from tpukit.errors import TPUKernelError
from tpukit.hardware.target import target_chip
from tpukit.kernels.blocks.vmem import (
    MIB,
    check_vmem,
    largest_that_fits,
    scoped_limit_bytes,
    vmem_capacity_bytes,
    vmem_limit_bytes,
)
from tpukit.kernels.ops.rms_norm.api import OP, case
from tpukit.kernels.ops.rms_norm.pallas_tpu import RowBlocks, fits
from tpukit.kernels.registry.registry import builtin_ops, get_tpu_op

CASE = case(8192, 4096)


def test_limits_are_the_compilers_and_safe_where_the_chip_is_not_known():
    assert scoped_limit_bytes("v5p") == scoped_limit_bytes(None) == 16 * MIB
    assert scoped_limit_bytes("trillium") == 32 * MIB
    assert vmem_capacity_bytes("v6e") > vmem_capacity_bytes("v5p") > vmem_capacity_bytes(None)


def test_a_limit_is_asked_for_only_where_it_is_needed():
    assert vmem_limit_bytes(8 * MIB, "v5e") is None
    assert vmem_limit_bytes(20 * MIB, "v5e") == 25 * MIB
    assert vmem_limit_bytes(60 * MIB, "v5p") == vmem_capacity_bytes("v5p")


def test_blocks_that_fit_are_counted():
    use = check_vmem(OP, CASE, RowBlocks(256), "v6e")
    # Three bf16 windows of 256 x 4096, and three float32 lines of a tile each, all twice.
    assert use.used_bytes == 2 * (3 * 256 * 4096 * 2 + 3 * 8 * 4096 * 4)
    assert use.limit_bytes is None
    assert use.to_dict()["capacity_bytes"]["value"] == vmem_capacity_bytes("v6e")


def test_overflow_names_the_largest_that_fits():
    message = r"block_rows=4096 on bfloat16\[8192,4096\].* a core of v5p has 63.9 MiB; the largest"
    with pytest.raises(TPUKernelError, match=message + r" that fit are block_rows=1024, 48.8 MiB"):
        check_vmem(OP, CASE, RowBlocks(4096), "v5p")
    assert largest_that_fits(OP, CASE, "v6e") == RowBlocks(2048)


def test_nothing_may_fit():
    wide = case(16, 2**21)
    with pytest.raises(TPUKernelError, match="no blocks of its space fit: make the arrays smaller"):
        check_vmem(OP, wide, RowBlocks(16), "v5e")
    assert not fits(wide.arguments[0], "v5e")


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "7x", None])
def test_default_blocks_fit_everywhere(chip):
    for shape in ((8192, 4096), (3, 130), (64, 32768)):
        sizes = OP.default_blocks(case(*shape), chip)
        assert OP.vmem_bytes(case(*shape), sizes) <= vmem_capacity_bytes(chip)


def test_norms_take_larger_windows_where_memory_is_fast_and_rows_are_many():
    rows = {chip: OP.default_blocks(CASE, chip).block_rows for chip in ("v5e", "v6e", "7x")}
    assert rows == {"v5e": 256, "v6e": 512, "7x": 512}
    few = case(1024, 4096)
    assert OP.default_blocks(few, "v6e") == OP.default_blocks(few, "v5e")


@pytest.mark.parametrize("name", builtin_ops())
def test_every_op_refuses_given_blocks_that_do_not_fit(name):
    op = get_tpu_op(name)
    # The largest of its cases: blocks are cut to what there is to cut.
    case = max(op.cases, key=lambda case: sum(array.size for array in case.arguments))
    usual = op.default_blocks(case, "v5p")
    sizes = {
        key: size * 4096 for key, size in usual.to_dict().items() if not isinstance(size, bool)
    }
    huge = dataclasses.replace(usual, **sizes)
    bound = op.bind(case, blocks=huge, direction="backward" if op.differentiable else "forward")
    message = rf"^{name} with .* of VMEM, but a core of v5p has 63.9 MiB; the largest that fit are"
    with target_chip("v5p"), pytest.raises(TPUKernelError, match=message):
        jax.eval_shape(bound, *case.arguments)
