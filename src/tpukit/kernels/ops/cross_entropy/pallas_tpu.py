"""Cross-entropy as TPU kernels: a block of logits lives in VMEM and never reaches HBM.

Forward keeps, for every token and every lane, a running maximum and a running sum of exponentials
of the columns seen in that lane; lanes are joined once, after the last block of the vocabulary.
Backward makes the logits again, once for the gradient of x and once for that of w.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tiling import LANES
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_limit_bytes
from ...registry.op import KernelCase
from ..gemm.tile import Interpret, accumulate, tile_dot, zero_past_end
from .blocks import CrossEntropyBlocks, vmem_bytes
from .terms import CrossEntropy, LossTerms, Reduction, reduce_losses

# Stands for minus infinity: finite, so that a lane of nothing but padding makes no NaN.
NOTHING = -1e30


# As `dispatch` has it, which does not see this gradient: its products say how exact they are.
@jax.default_matmul_precision(None)
def cross_entropy_pallas(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: Reduction = "mean",
    blocks: CrossEntropyBlocks | None = None,
    interpret: Interpret = False,
) -> CrossEntropy:
    """See `cross_entropy`."""
    terms = LossTerms(z_loss, soft_cap)
    chosen = blocks_for("cross_entropy", _case(x, w, labels, weights), blocks)
    result: Any = _token_losses(x, w, labels, terms, chosen, interpret)
    losses, log_normaliser = result
    return CrossEntropy(
        reduce_losses(losses, weights.astype(losses.dtype), reduction),
        jax.lax.stop_gradient(log_normaliser),
    )


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _token_losses(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    terms: LossTerms,
    blocks: CrossEntropyBlocks,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:
    tokens, width = x.shape
    vocab = w.shape[1]
    block_tokens, block_vocab = blocks.tokens, blocks.vocab
    column = pl.BlockSpec((block_tokens, 1), lambda token, _: (token, 0))
    log_normaliser, label_logit = pl.pallas_call(
        partial(_forward_kernel, terms=terms, vocab=vocab),
        grid=(pl.cdiv(tokens, block_tokens), pl.cdiv(vocab, block_vocab)),
        in_specs=[
            column,
            pl.BlockSpec((block_tokens, width), lambda token, _: (token, 0)),
            pl.BlockSpec((width, block_vocab), lambda _, column: (0, column)),
        ],
        out_specs=[column, column],
        out_shape=[jax.ShapeDtypeStruct((tokens, 1), jnp.float32)] * 2,
        scratch_shapes=[pltpu.VMEM((block_tokens, LANES), jnp.float32)] * 3,
        compiler_params=_compiler_params(x, w, blocks),
        interpret=interpret,
        name="cross_entropy_forward",
    )(labels[:, None], x, w)
    log_normaliser, label_logit = log_normaliser[:, 0], label_logit[:, 0]
    return terms.from_normaliser(log_normaliser, label_logit), log_normaliser


def _forward(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    terms: LossTerms,
    blocks: CrossEntropyBlocks,
    interpret: Interpret,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    result: Any = _token_losses(x, w, labels, terms, blocks, interpret)
    return result, (x, w, labels, result[1])


@jax.default_matmul_precision(None)
def _backward(
    terms: LossTerms,
    blocks: CrossEntropyBlocks,
    interpret: Interpret,
    residuals: tuple[jax.Array, ...],
    factors: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None]:
    x, w, labels, log_normaliser = residuals
    (tokens, width), vocab = x.shape, w.shape[1]
    token_blocks = pl.cdiv(tokens, blocks.backward_tokens)
    vocab_blocks = pl.cdiv(vocab, blocks.backward_vocab)

    def call(
        kernel: Any, grid: tuple[int, int], token: int, scratch: tuple[int, int], of_x: bool
    ) -> jax.Array:
        """`token` is the grid dimension that counts blocks of tokens; the other counts columns."""
        column = pl.BlockSpec((blocks.backward_tokens, 1), lambda *at: (at[token], 0))
        x_spec = pl.BlockSpec((blocks.backward_tokens, width), lambda *at: (at[token], 0))
        w_spec = pl.BlockSpec((width, blocks.backward_vocab), lambda *at: (0, at[1 - token]))
        return pl.pallas_call(
            partial(kernel, terms=terms, tokens=tokens, vocab=vocab),
            grid=grid,
            in_specs=[column, column, column, x_spec, w_spec],
            out_specs=x_spec if of_x else w_spec,
            out_shape=jax.ShapeDtypeStruct(*((x.shape, x.dtype) if of_x else (w.shape, w.dtype))),
            scratch_shapes=[pltpu.VMEM(scratch, jnp.float32)],
            compiler_params=_compiler_params(x, w, blocks),
            interpret=interpret,
            name="cross_entropy_dx" if of_x else "cross_entropy_dw",
        )(labels[:, None], log_normaliser[:, None], factors[0][:, None], x, w)

    d_x = call(_dx_kernel, (token_blocks, vocab_blocks), 0, (blocks.backward_tokens, width), True)
    d_w = call(_dw_kernel, (vocab_blocks, token_blocks), 1, (width, blocks.backward_vocab), False)
    return d_x, d_w, None


_token_losses.defvjp(_forward, _backward)


def _case(*arrays: jax.Array) -> KernelCase:
    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
    return KernelCase("traced", shapes)


def _compiler_params(x: jax.Array, w: jax.Array, blocks: CrossEntropyBlocks) -> Any:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=vmem_limit_bytes(vmem_bytes(_case(x, w), blocks), current_target()),
    )


def _forward_kernel(
    labels: Any,
    x: Any,
    w: Any,
    log_normaliser: Any,
    label_logit: Any,
    lane_max: Any,
    lane_sum: Any,
    lane_label: Any,
    *,
    terms: LossTerms,
    vocab: int,
) -> None:
    step, steps = pl.program_id(1), pl.num_programs(1)
    block_vocab = w.shape[1]

    @pl.when(step == 0)
    def _start() -> None:
        lane_max[...] = jnp.full(lane_max.shape, NOTHING, jnp.float32)
        lane_sum[...] = jnp.zeros(lane_sum.shape, jnp.float32)
        lane_label[...] = jnp.zeros(lane_label.shape, jnp.float32)

    logits = terms.capped(tile_dot(x[...], w[...]))
    columns = step * block_vocab + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    if vocab % block_vocab:
        logits = jnp.where(columns < vocab, logits, NOTHING)
    at_label = jnp.where(columns == labels[...], logits, 0.0)
    slices = [slice(start, start + LANES) for start in range(0, block_vocab, LANES)]
    highest = lane_max[...]
    for lanes in slices:
        highest = jnp.maximum(highest, logits[:, lanes])
    total = lane_sum[...] * jnp.exp(lane_max[...] - highest)
    chosen = lane_label[...]
    for lanes in slices:
        total = total + jnp.exp(logits[:, lanes] - highest)
        chosen = chosen + at_label[:, lanes]
    lane_max[...], lane_sum[...], lane_label[...] = highest, total, chosen

    @pl.when(step == steps - 1)
    def _finish() -> None:
        top = jnp.max(highest, axis=1, keepdims=True)
        joined = jnp.sum(total * jnp.exp(highest - top), axis=1, keepdims=True)
        log_normaliser[...] = top + jnp.log(joined)
        label_logit[...] = jnp.sum(chosen, axis=1, keepdims=True)


def _dx_kernel(
    labels: Any,
    log_normaliser: Any,
    factor: Any,
    x: Any,
    w: Any,
    d_x: Any,
    total: Any,
    *,
    terms: LossTerms,
    tokens: int,
    vocab: int,
) -> None:
    step, steps = pl.program_id(1), pl.num_programs(1)
    w_here = zero_past_end(w[...], step * w.shape[1], vocab, axis=1)
    d_logits = _d_logits(labels, log_normaliser, factor, x[...], w_here, step, terms, vocab)
    more = tile_dot(d_logits.astype(w.dtype), w_here, contract=(1, 1))
    accumulate(total, more, step)

    @pl.when(step == steps - 1)
    def _finish() -> None:
        d_x[...] = total[...].astype(d_x.dtype)


def _dw_kernel(
    labels: Any,
    log_normaliser: Any,
    factor: Any,
    x: Any,
    w: Any,
    d_w: Any,
    total: Any,
    *,
    terms: LossTerms,
    tokens: int,
    vocab: int,
) -> None:
    step, steps = pl.program_id(1), pl.num_programs(1)
    first_token = step * x.shape[0]
    x_here = zero_past_end(x[...], first_token, tokens, axis=0)
    d_logits = _d_logits(
        labels, log_normaliser, factor, x_here, w[...], pl.program_id(0), terms, vocab
    )
    d_logits = zero_past_end(d_logits, first_token, tokens, axis=0)
    more = tile_dot(x_here, d_logits.astype(x.dtype), contract=(0, 0))
    accumulate(total, more, step)

    @pl.when(step == steps - 1)
    def _finish() -> None:
        d_w[...] = total[...].astype(d_w.dtype)


def _d_logits(
    labels: Any,
    log_normaliser: Any,
    factor: Any,
    x: jax.Array,
    w: jax.Array,
    vocab_step: Any,
    terms: LossTerms,
    vocab: int,
) -> jax.Array:
    logits = tile_dot(x, w)
    first = vocab_step * w.shape[1]
    columns = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    slope = terms.gradient(logits, columns == labels[...], log_normaliser[...], factor[...])
    return zero_past_end(slope, first, vocab, axis=1)
