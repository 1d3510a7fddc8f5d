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
from ...partition.splits import Assignment, Axes, Splits, add_up
from ...registry.gradient import Passes, dispatch_with_gradient
from ...registry.op import PALLAS_TPU, KernelCase
from ..gemm.tile import Interpret, accumulate, tile_dot, zero_past_end
from .blocks import CrossEntropyBlocks, vmem_bytes
from .terms import CrossEntropy, LossTerms, Reduction, reduce_losses

# Stands for minus infinity: finite, so that a lane of nothing but padding makes no NaN.
NOTHING = -1e30
OP_NAME = "cross_entropy"
Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
# Of some columns a device knows a part of the softmax, which is joined as lanes are.
SPLITS = Splits(
    free="t v",
    arguments=("t d", "d v", "t"),
    result=("t", "t"),
    residuals=("t d", "d v", "t", "t"),
    told_axes=True,
)


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
    losses, log_normaliser = dispatch_with_gradient(
        OP_NAME,
        {PALLAS_TPU: Passes(forward, backward)},
        *(x, w, labels),
        splits=SPLITS,
        implementation=PALLAS_TPU,
        options={"terms": LossTerms(z_loss, soft_cap)},
        pallas_options={"blocks": blocks, "interpret": interpret},
    )
    return CrossEntropy(
        reduce_losses(losses, weights.astype(losses.dtype), reduction),
        jax.lax.stop_gradient(log_normaliser),
    )


def without_gradient(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: Reduction = "mean",
    blocks: CrossEntropyBlocks | None = None,
    axes: Assignment | None = None,
) -> CrossEntropy:
    """See `cross_entropy`; a device may have some of the tokens and some of the columns."""
    terms = LossTerms(z_loss, soft_cap)
    (losses, log_normaliser), _ = forward(x, w, labels, terms=terms, blocks=blocks, axes=axes)
    over = (axes or {}).get("t", ())
    loss = reduce_losses(losses, weights.astype(losses.dtype), reduction, over=over)
    return CrossEntropy(loss, log_normaliser)


def forward(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    terms: LossTerms,
    blocks: CrossEntropyBlocks | None = None,
    interpret: Interpret = False,
    axes: Assignment | None = None,
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    """Losses and log-normalisers (T,) of tokens (T, d), with a head (d, V) and labels (T,).

    A device may have some of the tokens and some of the columns.
    """
    blocks = blocks_for(OP_NAME, _whole_case(x, w, labels), blocks)
    over = (axes or {}).get("v", ())
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
    )(_own_columns(labels, vocab, over)[:, None], x, w)
    log_normaliser, label_logit = log_normaliser[:, 0], label_logit[:, 0]
    if over:
        every = jax.lax.all_gather(log_normaliser, over)
        log_normaliser = jax.nn.logsumexp(every, axis=0)
        label_logit = add_up(label_logit, over)
    losses = terms.from_normaliser(log_normaliser, label_logit)
    return (losses, log_normaliser), (x, w, labels, log_normaliser)


def backward(
    residuals: Residuals,
    factors: tuple[jax.Array, jax.Array],
    *,
    terms: LossTerms,
    blocks: CrossEntropyBlocks | None = None,
    interpret: Interpret = False,
    axes: Assignment | None = None,
) -> tuple[jax.Array, jax.Array, None]:
    """Gradients of x and w: of a device's columns, of its tokens, and then added up."""
    x, w, labels, log_normaliser = residuals
    sizes = blocks_for(OP_NAME, _whole_case(x, w, labels), blocks)
    split = dict(axes or {})
    (tokens, width), vocab = x.shape, w.shape[1]
    token_blocks = pl.cdiv(tokens, sizes.backward_tokens)
    vocab_blocks = pl.cdiv(vocab, sizes.backward_vocab)
    own_labels = _own_columns(labels, vocab, split.get("v", ()))

    def call(
        kernel: Any, grid: tuple[int, int], token: int, scratch: tuple[int, int], of_x: bool
    ) -> jax.Array:
        """`token` is the grid dimension that counts blocks of tokens; the other counts columns."""
        column = pl.BlockSpec((sizes.backward_tokens, 1), lambda *at: (at[token], 0))
        x_spec = pl.BlockSpec((sizes.backward_tokens, width), lambda *at: (at[token], 0))
        w_spec = pl.BlockSpec((width, sizes.backward_vocab), lambda *at: (0, at[1 - token]))
        return pl.pallas_call(
            partial(kernel, terms=terms, tokens=tokens, vocab=vocab),
            grid=grid,
            in_specs=[column, column, column, x_spec, w_spec],
            out_specs=x_spec if of_x else w_spec,
            out_shape=jax.ShapeDtypeStruct(*((x.shape, x.dtype) if of_x else (w.shape, w.dtype))),
            scratch_shapes=[pltpu.VMEM(scratch, jnp.float32)],
            compiler_params=_compiler_params(x, w, sizes),
            interpret=interpret,
            name="cross_entropy_dx" if of_x else "cross_entropy_dw",
        )(own_labels[:, None], log_normaliser[:, None], factors[0][:, None], x, w)

    d_x = call(_dx_kernel, (token_blocks, vocab_blocks), 0, (sizes.backward_tokens, width), True)
    d_w = call(_dw_kernel, (vocab_blocks, token_blocks), 1, (width, sizes.backward_vocab), False)
    return add_up(d_x, split.get("v", ())), add_up(d_w, split.get("t", ())), None


def _own_columns(labels: jax.Array, vocab: int, over: Axes) -> jax.Array:
    """Labels counted from this device's first column; -1 for those of others."""
    if not over:
        return labels
    own = labels - jax.lax.axis_index(over) * vocab
    return jnp.where((own >= 0) & (own < vocab), own, -1)


def _whole_case(x: jax.Array, w: jax.Array, labels: jax.Array) -> KernelCase:
    """With the weights of tokens, as blocks are tuned for."""
    case = _case(x, w, labels)
    weights = jax.ShapeDtypeStruct(labels.shape, jnp.float32)
    return KernelCase(case.name, (*case.arguments, weights))


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
