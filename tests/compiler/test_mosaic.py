"""FLOPs of kernels counted on their Mosaic programs, against counts made in another way.

Kernels are lowered for TPU here, as for any offline compile; no compiler and no TPU takes part.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from mosaic_programs import PRODUCT, multiply_where_listed, program_of, programs_of

from tpukit.compiler.mosaic import Uncountable, kernel_flops
from tpukit.kernels import flash_attention
from tpukit.kernels.ops.flash_attention import reference
from tpukit.kernels.ops.flash_attention.problem import FlashBlocks
from tpukit.step.traced_flops import traced_flops


def test_a_product_counts_for_every_point_of_the_grid():
    def kernel(a, b, out):
        out[...] = jnp.dot(a[...], b[...])

    assert kernel_flops(program_of(kernel, grid=(3, 5))) == 15 * PRODUCT


def test_a_branch_counts_where_it_is_taken():
    def kernel(a, b, out):
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j <= i)
        def _():
            out[...] = jnp.dot(a[...], b[...])

    assert kernel_flops(program_of(kernel, grid=(6, 6))) == 21 * PRODUCT


def test_a_loop_counts_as_often_as_it_turns():
    def kernel(a, b, out):
        i = pl.program_id(0)

        def turn(k, carry):
            out[...] += jnp.dot(a[...], b[...])
            return carry

        jax.lax.fori_loop(jax.lax.div(i, 2), i + 1, turn, 0)

    turns = sum(i + 1 - i // 2 for i in range(7))
    assert kernel_flops(program_of(kernel, grid=(7, 2))) == 2 * turns * PRODUCT


def test_turns_that_differ_are_followed_one_by_one():
    def kernel(a, b, out):
        def turn(k, carry):
            @pl.when(carry % 3 == 0)
            def _():
                out[...] += jnp.dot(a[...], b[...])

            return carry + k

        jax.lax.fori_loop(0, pl.program_id(0), turn, jnp.int32(0))

    expected = 0
    for i in range(9):
        carry = 0
        for k in range(i):
            expected += carry % 3 == 0
            carry += k
    assert kernel_flops(program_of(kernel, grid=(9, 1))) == expected * PRODUCT


def test_a_table_that_the_program_holds_says_what_is_visited():
    encoded = program_of(multiply_where_listed, grid=(4, 2), tables=1)
    assert kernel_flops(encoded, ((1, 3, 9, 2), None, None)) == 2 * 2 * PRODUCT


def test_a_table_nobody_knows_is_a_reason_and_no_number():
    encoded = program_of(multiply_where_listed, grid=(4, 2), tables=1)
    with pytest.raises(Uncountable, match="only at run time"):
        kernel_flops(encoded)


def test_a_program_that_is_none_is_a_reason():
    with pytest.raises(Uncountable, match="cannot be read"):
        kernel_flops("bm90IGEga2VybmVs")


# --- Flash attention: products of the reference on each pair of blocks that some query sees. -----

TOKENS, HEADS, BATCH, WIDTH = 1024, 2, 3, 128
EDGE = 256
BLOCKS = FlashBlocks(
    block_q=512, block_kv=1024, block_kv_compute=EDGE,
    backward_q=1024, backward_q_compute=EDGE, backward_kv=512,
)  # fmt: skip


def visited_pairs(window):
    """Pairs of blocks in which some query attends to some key, looked up in the mask itself."""
    query, key = np.arange(TOKENS)[:, None], np.arange(TOKENS)[None, :]
    visible = (key <= query) & (query - key < (window or TOKENS))
    cut = TOKENS // EDGE
    return int(visible.reshape(cut, EDGE, cut, EDGE).any(axis=(1, 3)).sum())


def flops_of_reference(window, *, backward):
    """Products of plain attention on one pair of blocks, times those visited."""
    block = jax.ShapeDtypeStruct((1, EDGE, 1, WIDTH), jnp.bfloat16)

    def attend(q, k, v):
        return reference.attention(q, k, v).sum()

    function = jax.grad(attend, argnums=(0, 1, 2)) if backward else attend
    once = traced_flops(jax.make_jaxpr(function)(block, block, block).jaxpr)
    return once.value * visited_pairs(window) * BATCH * HEADS


@pytest.mark.parametrize("window", [None, 512])
def test_causal_attention_computes_the_blocks_it_visits(window):
    array = jax.ShapeDtypeStruct((BATCH, TOKENS, HEADS, WIDTH), jnp.bfloat16)

    def attend(q, k, v):
        return flash_attention(q, k, v, causal=True, window=window, blocks=BLOCKS)

    (forward,) = programs_of(attend, array, array, array)
    assert kernel_flops(forward) == flops_of_reference(window, backward=False)


def test_backward_makes_the_scores_again_for_all_three_gradients():
    array = jax.ShapeDtypeStruct((BATCH, TOKENS, HEADS, WIDTH), jnp.bfloat16)

    def loss(q, k, v):
        return flash_attention(q, k, v, causal=True, blocks=BLOCKS).astype(jnp.float32).sum()

    forward, backward = programs_of(jax.grad(loss, argnums=(0, 1, 2)), array, array, array)
    # The reference's gradient runs forward and backward with the scores kept: two products and
    # four. The kernel has them made again: one more.
    both = flops_of_reference(None, backward=True)
    assert kernel_flops(forward) + kernel_flops(backward) == both * 7 / 6
