"""The tuner: what it tries, what it keeps, and what it refuses, against a timer made by hand."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from tpukit.errors import TPUKernelError, TPUNotAvailableError, XLACompilationError
from tpukit.kernels.blocks.tuned import load_tuned
from tpukit.kernels.registry.op import BlockSizes, KernelCase, Op
from tpukit.kernels.tuning import local_chip, tune_op

CASE = KernelCase("square", (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16),))
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Blocks(BlockSizes):
    """Rows of the forward pass and of the backward pass."""

    rows: int = 128
    backward_rows: int = 128


def make_op(space, *, differentiable=(0,)):
    return Op(
        name="made_up",
        function=jnp.sin,
        implementations={},
        cases=(CASE,),
        block_space=lambda case, chip: space,
        vmem_bytes=lambda case, blocks: blocks.rows * MIB // 16,
        default_blocks=lambda case, chip: Blocks(),
        differentiable=differentiable,
    )


def forward_s(blocks):
    """Fastest at 512 rows; the sizes of the backward pass do not matter."""
    return 1e-4 * (1 + abs(blocks.rows - 512) / 512)


def timer(blocks, direction):
    if direction == "forward":
        return forward_s(blocks)
    return forward_s(blocks) + 2e-4 * (1 + abs(blocks.backward_rows - 256) / 256)


SPACE = [
    *(Blocks(rows=rows) for rows in (128, 256, 512, 1024)),
    *(Blocks(backward_rows=rows) for rows in (256, 512)),
]


def test_the_best_of_each_pass_is_put_together():
    found = tune_op(make_op(SPACE), CASE, "v6e", timer=timer)
    assert found.chosen.blocks == Blocks(rows=512, backward_rows=256)
    assert found.default.blocks == Blocks()
    assert found.gain == pytest.approx(forward_s(Blocks()) / 1e-4)
    assert found.chosen.gradient_s == pytest.approx(3e-4)


def test_sizes_that_serve_both_passes_are_chosen_by_both():
    def shared(blocks, direction):
        backward = 3e-4 * (1 + abs(blocks.rows - 128) / 128)
        return forward_s(blocks) + (backward if direction == "backward" else 0.0)

    space = [Blocks(rows=rows) for rows in (128, 256, 512)]
    assert tune_op(make_op(space), CASE, "v6e", timer=shared).chosen.blocks == Blocks(rows=128)
    forward = tune_op(make_op(space), CASE, "v6e", timer=shared, gradient=False)
    assert forward.chosen.blocks == Blocks(rows=512)


def test_what_vmem_cannot_hold_is_never_timed():
    asked = []

    def watched(blocks, direction):
        asked.append(blocks)
        return timer(blocks, direction)

    space = [*SPACE, Blocks(rows=4096)]  # 256 MiB
    found = tune_op(make_op(space), CASE, "v6e", timer=watched)
    assert found.too_large == 1
    assert Blocks(rows=4096) not in asked


def test_a_gain_smaller_than_the_estimates_can_tell_changes_nothing():
    def nearly_flat(blocks, direction):
        return 1e-4 * (1 - 0.01 * (blocks.rows == 512))

    found = tune_op(make_op(SPACE, differentiable=()), CASE, "v6e", timer=nearly_flat)
    assert found.chosen.blocks == Blocks()


def test_what_the_compiler_refuses_is_kept_with_its_reason():
    def refusing(blocks, direction):
        if blocks.rows == 512:
            raise XLACompilationError("E1001: scoped vmem")
        return timer(blocks, direction)

    found = tune_op(make_op(SPACE, differentiable=()), CASE, "v6e", timer=refusing)
    assert found.chosen.blocks.rows in (256, 1024)
    (refused,) = [trial for trial in found.trials if trial.forward_s is None]
    assert refused.error == "E1001: scoped vmem"


def test_when_nothing_compiles_it_says_so():
    def refusing(blocks, direction):
        raise XLACompilationError("E1001: scoped vmem")

    with pytest.raises(TPUKernelError, match="none of 6 choices of blocks has a time: E1001"):
        tune_op(make_op(SPACE), CASE, "v6e", timer=refusing)


def test_where_no_backward_pass_has_a_time_the_fastest_forward_stands():
    def refusing(blocks, direction):
        if direction == "backward" or blocks == Blocks():
            raise XLACompilationError("E1001: scoped vmem")
        return timer(blocks, direction)

    found = tune_op(make_op(SPACE), CASE, "v6e", timer=refusing)
    assert found.chosen.blocks == Blocks(rows=512)
    assert found.entry().time_us == pytest.approx(100)


def test_a_budget_leaves_the_rest_untried_but_never_the_default():
    found = tune_op(make_op(SPACE), CASE, "v6e", timer=timer, seconds=-1.0)
    assert [trial.blocks for trial in found.trials] == [Blocks()]
    assert found.left > 0
    assert found.chosen.blocks == Blocks()


def test_saved_choices_are_what_dispatch_reads(tmp_path):
    found = tune_op(make_op(SPACE), CASE, "v6e", timer=timer)
    path = found.save(tmp_path)
    assert path == tmp_path / "v6e.json"
    entry = load_tuned(tmp_path, "v6e")[found.bucket]
    assert entry.blocks == {"rows": 512, "backward_rows": 256}
    assert entry.origin == "model"
    assert entry.time_us == pytest.approx(100.0)
    assert set(entry.versions) == {"jax", "jaxlib", "libtpu"}
    again = dataclasses.replace(found, bucket="another")
    again.save(tmp_path)
    assert set(load_tuned(tmp_path, "v6e")) == {found.bucket, "another"}
    assert json.loads(json.dumps(found.to_dict()))["origin"] == "model"


def test_measuring_without_a_tpu_is_refused():
    with pytest.raises(TPUNotAvailableError, match="has cpu devices; run it on a TPU VM"):
        local_chip()
