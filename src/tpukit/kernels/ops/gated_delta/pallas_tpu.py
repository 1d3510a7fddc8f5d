"""The gated delta rule as a TPU kernel: the state stays in VMEM from the first token to the last.

One grid step is a chunk of some heads (`xla.py` has the algebra). The state is at hand, so what
tokens write takes one product with the inverse: U = T beta (V - exp(G) K S). Several heads go
through a step together: their chains of products fill each other's waits.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tiling import LANES, round_up
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_limit_bytes
from ...registry.op import KernelCase
from ..gemm.tile import Interpret, tile_dot
from . import xla
from .blocks import CHUNK, RATES, DeltaBlocks, vmem_bytes
from .reference import EPS, first_state
from .xla import Residuals, chunk_rates

OP_NAME = "gated_delta"


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None = None,
    starts: jax.Array | None = None,
    *,
    chunk: int | None = None,
    blocks: DeltaBlocks | None = None,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.gated_delta`; a chunk is as long as the lanes are wide."""
    del chunk
    batch, tokens, key_heads, width = k.shape
    heads, value_width = v.shape[2:]
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, g, beta))
    case = KernelCase("traced", shapes)
    blocks = blocks_for(OP_NAME, case, blocks)
    group, ours = heads // key_heads, blocks.key_heads
    length = round_up(tokens, CHUNK)
    state = _state(k, v, initial_state)
    wide, wide_values = state.shape[2:]
    q, k, v = (_side_by_side(x, length) for x in (q, k, v))
    rates = _rates(g, beta, starts, length)

    def of_tokens(count: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, CHUNK, count), lambda b, h, n: (b, n, h))

    of_state = pl.BlockSpec((1, ours * group, wide, wide_values), lambda b, h, n: (b, h, 0, 0))
    limit = vmem_limit_bytes(vmem_bytes(case, blocks), current_target())
    out, state = pl.pallas_call(
        partial(_kernel, key_heads=ours, group=group, scale=width**-0.5, cuts=starts is not None),
        grid=(batch, key_heads // ours, length // CHUNK),
        in_specs=[
            *[of_tokens(ours * wide)] * 2,
            of_tokens(ours * group * wide_values),
            pl.BlockSpec((1, RATES * ours * group, CHUNK), lambda b, h, n: (b, h, n)),
            of_state,
        ],
        out_specs=[of_tokens(ours * group * wide_values), of_state],
        out_shape=[
            jax.ShapeDtypeStruct((batch, length, heads * wide_values), q.dtype),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((ours * group, wide, wide_values), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=limit
        ),
        interpret=interpret,
        name=OP_NAME,
    )(q, k, v, rates, state)
    out = out.reshape(batch, length, heads, wide_values)[:, :tokens, :, :value_width]
    return out, state[:, :, :width, :value_width]


def forward(*arrays: Any, **options: Any) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    """The result and the last state, and the arguments as residuals."""
    residuals = Residuals(*arrays)
    return gated_delta(*residuals, **options), residuals


def backward(
    residuals: Residuals, cotangent: tuple[jax.Array, jax.Array], **options: Any
) -> tuple[jax.Array | None, ...]:
    """Gradients in the form that XLA computes, in chunks as long as here."""
    return xla.backward(residuals, cotangent, chunk=CHUNK)


def _kernel(
    q: Any,
    k: Any,
    v: Any,
    rates: Any,
    initial: Any,
    out: Any,
    last: Any,
    state: Any,
    *,
    key_heads: int,
    group: int,
    scale: float,
    cuts: bool,
) -> None:
    step, steps = pl.program_id(2), pl.num_programs(2)

    @pl.when(step == 0)
    def _start() -> None:
        state[...] = initial[0]

    width, value_width = state.shape[1:]
    rows = rates[0]
    columns = rows.T
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    systems: list[jax.Array] = []
    scores: list[jax.Array] = []
    pairs: list[jax.Array] = []
    for head in range(key_heads):
        lanes = slice(head * width, (head + 1) * width)
        queries, keys = _unit(q[0, :, lanes]) * scale, _unit(k[0, :, lanes])
        pair = jnp.concatenate([queries, keys]).astype(q.dtype)
        pairs.append(pair)
        products = tile_dot(pair, pair[CHUNK:], contract=(1, 1))
        for member in range(group):
            at = RATES * (head * group + member)
            line, lane = columns[:, at : at + RATES], rows[at : at + RATES]
            between = (line[:, 0:1] - lane[0:1]) + (line[:, 1:2] - lane[1:2])
            seen = row >= column
            if cuts:
                seen = seen & (line[:, 5:6] == lane[5:6])
            decay = jnp.exp(jnp.where(seen, between, -jnp.inf))
            scores.append((products[:CHUNK] * decay).astype(q.dtype))
            systems.append(line[:, 2:3] * products[CHUNK:] * decay)
    inverses = _inverses(systems, row, column, q.dtype)
    for number, (weights, inverse) in enumerate(zip(scores, inverses, strict=True)):
        pair, at = pairs[number // group], RATES * number
        line, lane = columns[:, at : at + RATES], rows[at : at + RATES]
        lanes = slice(number * value_width, (number + 1) * value_width)
        before = state[number]
        held = tile_dot(pair, before.astype(q.dtype))
        fade = line[:, 3:4]
        missing = v[0, :, lanes].astype(jnp.float32) - fade * held[CHUNK:]
        inverse = (inverse * lane[2:3]).astype(q.dtype)
        written = tile_dot(inverse, missing.astype(q.dtype))
        result = fade * held[:CHUNK] + tile_dot(weights, written.astype(q.dtype))
        out[0, :, lanes] = result.astype(out.dtype)
        lasting = (line[:, 4:5] * written).astype(q.dtype)
        # What is left of the state is what is left at the last token.
        kept = lane[3:4, CHUNK - 1 :] * before
        state[number] = kept + tile_dot(pair[CHUNK:], lasting, contract=(0, 0))

    @pl.when(step == steps - 1)
    def _finish() -> None:
        last[0] = state[...]


def _inverses(
    systems: Sequence[jax.Array], row: jax.Array, column: jax.Array, operands: Any
) -> list[jax.Array]:
    """(I + A)⁻¹ of the strictly lower part of each, as `triangular.unit_lower_inverse` finds it."""

    def left(block: int) -> jax.Array:
        """The lower left quarter of each diagonal block of twice `block`."""
        shift = block.bit_length() - 1
        high, low = row >> shift, column >> shift
        return ((high & 1) == 1) & (high == low + 1)

    eye = jnp.where(row == column, 1.0, 0.0)
    mask = left(1)
    inverses = [eye - jnp.where(mask, a, 0.0) for a in systems]
    systems = [a.astype(operands) for a in systems]
    block = 2
    while block < CHUNK:
        mask = left(block)
        narrow = [x.astype(operands) for x in inverses]
        lefts = [jnp.where(mask, a, jnp.zeros_like(a)) for a in systems]
        products = [tile_dot(x, a).astype(operands) for x, a in zip(narrow, lefts, strict=True)]
        inverses = [
            x - tile_dot(product, y)
            for x, product, y in zip(inverses, products, narrow, strict=True)
        ]
        block *= 2
    return inverses


def _unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)


def _rates(g: jax.Array, beta: jax.Array, starts: jax.Array | None, length: int) -> jax.Array:
    """(B, HV * RATES, S): for each head running sums of g (two parts), beta and decays."""
    batch, _, heads = g.shape
    found = chunk_rates(g, beta, starts, CHUNK)
    lines = [jnp.broadcast_to(x, found[0].shape) for x in found]
    stacked = jnp.stack([*lines, *[jnp.zeros_like(lines[0])] * (RATES - len(lines))])
    # (rate, n, b, h, i) -> (b, h rate, n i)
    return stacked.transpose(2, 3, 0, 1, 4).reshape(batch, heads * RATES, length)


def _side_by_side(x: jax.Array, length: int) -> jax.Array:
    """(B, S, H, D) as (B, length, H D): heads along lanes, each padded to whole groups of them."""
    padding = [(0, 0), (0, length - x.shape[1]), (0, 0), (0, -x.shape[3] % LANES)]
    x = jnp.pad(x, padding)
    return x.reshape(*x.shape[:2], -1)


def _state(k: jax.Array, v: jax.Array, initial_state: jax.Array | None) -> jax.Array:
    """The first state with its width padded to whole lanes."""
    state = first_state(k, v, initial_state).astype(jnp.float32)
    return jnp.pad(state, [(0, 0), (0, 0), *((0, -size % LANES) for size in state.shape[2:])])
