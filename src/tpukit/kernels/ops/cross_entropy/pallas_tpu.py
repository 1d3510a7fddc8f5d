"""Cross-entropy as TPU kernels: a block of logits stays in VMEM and never reaches HBM.

The forward kernel keeps, for every token and lane, a running maximum and a running sum of
exponentials of the columns in that lane. Lanes are joined once, after the last block of the
vocabulary. The backward pass recomputes the logits, once for the gradient of x and once for that of
w.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tiling import (
    LANES,
    Interpret,
    Ref,
    accumulate,
    round_up,
    tile_dot,
    tile_shape,
    zero_past_end,
)
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_capacity_bytes, vmem_limit_bytes
from ...partition.splits import Assignment, Axes, Splits, add_up
from ...registry.dispatch import Passes, dispatch_with_gradient
from ...registry.op import PALLAS_TPU, BlockSizes, KernelCase
from .terms import CrossEntropy, LossTerms, Reduction, reduce_losses

# Large blocks first: every block of tokens reads all of the head, so many tokens must share it.
TOKENS = (1024, 512, 256, 128, 64, 32)
VOCAB = (2048, 1024, 512, 256, 128)


@dataclass(frozen=True)
class CrossEntropyBlocks(BlockSizes):
    """Tokens and columns of one block of logits, forward and backward."""

    tokens: int
    vocab: int
    backward_tokens: int
    backward_vocab: int


def forward_bytes(width: int, itemsize: int, tokens: int, vocab: int) -> int:
    """Return the VMEM of the forward kernel: operands twice, lane statistics, float32 logits."""
    operands = 2 * width * (tokens + vocab) * itemsize
    return operands + 7 * tokens * LANES * 4 + 2 * tokens * vocab * 4


def backward_bytes(width: int, itemsize: int, tokens: int, vocab: int) -> int:
    """Return the VMEM of the larger backward kernel: operands and result twice, float32 sums."""
    operands = 2 * width * (tokens + vocab) * itemsize
    result = max(tokens, vocab) * width * (2 * itemsize + 4)
    # The addend of the sum is as large as the sum.
    return operands + result + max(tokens, vocab) * width * 4 + 3 * tokens * vocab * 4


def vmem_bytes(case: KernelCase, blocks: CrossEntropyBlocks) -> int:
    """Return the VMEM of the largest kernel."""
    width, itemsize = _width_and_itemsize(case)
    return max(
        forward_bytes(width, itemsize, blocks.tokens, blocks.vocab),
        backward_bytes(width, itemsize, blocks.backward_tokens, blocks.backward_vocab),
    )


def default_blocks(case: KernelCase, chip: str | None) -> CrossEntropyBlocks:
    """Return the largest nearly square blocks that leave a quarter of VMEM to the compiler."""
    return next(_candidates(case, chip, vmem_capacity_bytes(chip) * 3 // 4))


def block_space(case: KernelCase, chip: str) -> list[CrossEntropyBlocks]:
    """Return blocks that fit, with forward and backward sizes varied separately."""
    return list(_candidates(case, chip, vmem_capacity_bytes(chip)))


def _candidates(
    case: KernelCase, chip: str | None, budget_bytes: int
) -> Iterator[CrossEntropyBlocks]:
    x, w = case.arguments[:2]
    width, itemsize = _width_and_itemsize(case)
    tokens = round_up(x.shape[0], tile_shape(jnp.bfloat16, chip)[0])
    vocab = round_up(w.shape[1], LANES)
    sizes = [(t, v) for t in TOKENS for v in VOCAB]
    # Nearly square blocks move the fewest bytes for their area; tokens break the tie.
    sizes.sort(key=lambda size: (-min(size), -size[0]))
    sizes = list(dict.fromkeys((min(t, tokens), min(v, vocab)) for t, v in sizes))
    forward = [size for size in sizes if forward_bytes(width, itemsize, *size) <= budget_bytes]
    backward = [size for size in sizes if backward_bytes(width, itemsize, *size) <= budget_bytes]
    # Where nothing fits, offer the smallest and let the compiler decide.
    forward, backward = forward or sizes[-1:], backward or sizes[-1:]
    first = CrossEntropyBlocks(*forward[0], *backward[0])
    yield first
    for size in forward[1:]:
        yield replace(first, tokens=size[0], vocab=size[1])
    for size in backward[1:]:
        yield replace(first, backward_tokens=size[0], backward_vocab=size[1])


def _width_and_itemsize(case: KernelCase) -> tuple[int, int]:
    x, w = case.arguments[:2]
    return x.shape[1], max(jnp.dtype(x.dtype).itemsize, jnp.dtype(w.dtype).itemsize)


# In place of minus infinity: finite, so that a lane of only padding gives no NaN.
NOTHING = -1e30
OP_NAME = "cross_entropy"
Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
# A device with some of the columns has a part of the softmax, which is joined like lanes are.
SPLITS = Splits(
    free="t v",
    arguments=("t d", "d v", "t"),
    result=("t", "t"),
    residuals=("t d", "d v", "t", "t"),
    takes_axes=True,
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
    """Compute `cross_entropy` with the kernels in both passes."""
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
    """Compute `cross_entropy` on a device's shard of the tokens and columns."""
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
    """Return losses and log-normalisers (T,) of tokens (T, d), a head (d, V) and labels (T,).

    A device may have a shard of the tokens and of the columns.
    """
    blocks = blocks_for(OP_NAME, _weighted_case(x, w, labels), blocks)
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
        gathered = jax.lax.all_gather(log_normaliser, over)
        log_normaliser = jax.nn.logsumexp(gathered, axis=0)
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
    """Return the gradients of x and w, summed over devices."""
    x, w, labels, log_normaliser = residuals
    sizes = blocks_for(OP_NAME, _weighted_case(x, w, labels), blocks)
    split = dict(axes or {})
    (tokens, width), vocab = x.shape, w.shape[1]
    token_blocks = pl.cdiv(tokens, sizes.backward_tokens)
    vocab_blocks = pl.cdiv(vocab, sizes.backward_vocab)
    own_labels = _own_columns(labels, vocab, split.get("v", ()))

    def call(
        kernel: Any, grid: tuple[int, int], token: int, scratch: tuple[int, int], of_x: bool
    ) -> jax.Array:
        """Call a kernel; `token` is the grid dimension of token blocks, the other is of columns."""
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
    """Return labels relative to this device's first column; -1 for those of other devices."""
    if not over:
        return labels
    own = labels - jax.lax.axis_index(over) * vocab
    return jnp.where((own >= 0) & (own < vocab), own, -1)


def _weighted_case(x: jax.Array, w: jax.Array, labels: jax.Array) -> KernelCase:
    """Return the case with token weights, as blocks are tuned."""
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
    labels: Ref,
    x: Ref,
    w: Ref,
    log_normaliser: Ref,
    label_logit: Ref,
    lane_max: Ref,
    lane_sum: Ref,
    lane_label: Ref,
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
    labels: Ref,
    log_normaliser: Ref,
    factor: Ref,
    x: Ref,
    w: Ref,
    d_x: Ref,
    total: Ref,
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
    labels: Ref,
    log_normaliser: Ref,
    factor: Ref,
    x: Ref,
    w: Ref,
    d_w: Ref,
    total: Ref,
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
    labels: Ref,
    log_normaliser: Ref,
    factor: Ref,
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
