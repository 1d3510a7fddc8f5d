"""The forward kernel of the gated delta rule, which also computes what its gradients need.

`xla.py` has the algebra. The kernel has the state, so that what tokens write is one matmul with the
inverse: U = T beta (V - exp(G) K S).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...blocks.tiling import Ref, tile_dot, tile_shape
from .operands import CHUNK, OP_NAME, RATES, Operands, head_rates, places, unit
from .reference import first_state
from .xla import DeltaResiduals


def run_forward(operands: Operands, given: DeltaResiduals) -> tuple[jax.Array, jax.Array]:
    """Return the result and the last state."""
    state = _first(operands, given)
    heads = given.v.shape[2]
    length, (_, wide) = operands.chunks * CHUNK, operands.state
    out, last = operands.call(
        partial(_kernel, operands=operands, keeps=False),
        OP_NAME,
        _read(operands, given, state),
        [
            (
                jax.ShapeDtypeStruct((operands.batch, length, heads * wide), given.q.dtype),
                operands.window(CHUNK, operands.heads * wide, of="tokens"),
            ),
            (
                jax.ShapeDtypeStruct(state.shape, jnp.float32),
                operands.window(operands.heads, *operands.state, of="state"),
            ),
        ],
    )
    out = operands.apart(out, heads=heads, width=operands.value_width)
    return out, last[:, :, : operands.width, : operands.value_width]


def run_again(operands: Operands, given: DeltaResiduals) -> tuple[jax.Array, jax.Array]:
    """Return the state before each chunk and the inverse of its system, in the values' dtype."""
    every = operands.batch, operands.chunks, given.v.shape[2]
    states, inverses = operands.call(
        partial(_kernel, operands=operands, keeps=True),
        f"{OP_NAME}_again",
        _read(operands, given, _first(operands, given)),
        [
            (
                jax.ShapeDtypeStruct((*every, *sizes), given.v.dtype),
                operands.window(operands.heads, *sizes, of="kept"),
            )
            for sizes in (operands.state, (CHUNK, CHUNK))
        ],
    )
    return states, inverses


def _first(operands: Operands, given: DeltaResiduals) -> jax.Array:
    return operands.pad_state(first_state(given.k, given.v, given.initial_state))


def _read(
    operands: Operands, given: DeltaResiduals, state: jax.Array
) -> list[tuple[jax.Array, pl.BlockSpec]]:
    width, value_width = operands.state
    of_keys = operands.window(CHUNK, operands.key_heads * width, of="tokens")
    return [
        (operands.side_by_side(given.q), of_keys),
        (operands.side_by_side(given.k), of_keys),
        (
            operands.side_by_side(given.v),
            operands.window(CHUNK, operands.heads * value_width, of="tokens"),
        ),
        (operands.rates(given), operands.window(RATES * operands.heads, CHUNK, of="rates")),
        (state, operands.window(operands.heads, *operands.state, of="state")),
    ]


def _kernel(
    q: Ref,
    k: Ref,
    v: Ref,
    rates: Ref,
    initial: Ref,
    out: Ref,
    other: Ref,
    state: Ref,
    *,
    operands: Operands,
    keeps: bool,
) -> None:
    """Write results and last state, or states and inverses if it `keeps` them."""
    step, steps = pl.program_id(2), pl.num_programs(2)

    @pl.when(step == 0)
    def _start() -> None:
        state[...] = initial[0]

    narrow = q.dtype
    width, value_width = operands.state
    row, column = places()
    rates_of = head_rates(rates[0])
    # All heads go through each stage together, so that their matmuls overlap.
    systems: list[jax.Array] = []
    scores: list[jax.Array] = []
    pairs: list[jax.Array] = []
    for head in range(operands.key_heads):
        lanes = slice(head * width, (head + 1) * width)
        queries = unit(q[0, :, lanes])[0] * operands.width**-0.5
        pair = jnp.concatenate([queries, unit(k[0, :, lanes])[0]]).astype(narrow)
        products = tile_dot(pair, pair[CHUNK:], contract=(1, 1))
        pairs.append(pair)
        for member in range(operands.group):
            own = rates_of[head * operands.group + member]
            decay = own.decays(row >= column, cuts=operands.cuts)
            scores.append((products[:CHUNK] * decay).astype(narrow))
            systems.append(own.beta * products[CHUNK:] * decay)
    inverses = _inverses(systems, row, column, narrow)
    for number, (weights, inverse) in enumerate(zip(scores, inverses, strict=True)):
        pair, own = pairs[number // operands.group], rates_of[number]
        lanes = slice(number * value_width, (number + 1) * value_width)
        before, inverse = state[number], inverse.astype(narrow)
        held = tile_dot(pair, before.astype(narrow))
        missing = own.beta * (v[0, :, lanes].astype(jnp.float32) - own.fade * held[CHUNK:])
        written = tile_dot(inverse, missing.astype(narrow))
        if keeps:
            out[0, 0, number], other[0, 0, number] = before.astype(narrow), inverse
        else:
            result = own.fade * held[:CHUNK] + tile_dot(weights, written.astype(narrow))
            out[0, :, lanes] = result.astype(out.dtype)
        lasting = (own.rest * written).astype(narrow)
        kept = own.fade_whole * before
        state[number] = kept + tile_dot(pair[CHUNK:], lasting, contract=(0, 0))

    if not keeps:

        @pl.when(step == steps - 1)
        def _finish() -> None:
            other[0] = state[...]


def _inverses(
    systems: Sequence[jax.Array], row: jax.Array, column: jax.Array, operands: Any
) -> list[jax.Array]:
    """Return (I + A)⁻¹ of the strictly lower part of each, as `unit_lower_inverse` does."""

    def left(block: int) -> jax.Array:
        """Return the lower left quarter of each diagonal block of twice `block`."""
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
        lefts = [jnp.where(mask, a, jnp.zeros_like(a)) for a in systems]
        inverses = [_merge(x, a, block) for x, a in zip(inverses, lefts, strict=True)]
        block *= 2
    return inverses


def _merge(inverse: jax.Array, left: jax.Array, block: int) -> jax.Array:
    """Return T - T L T, of which only the lower half of each merged block changes.

    Only that half is multiplied. Halves that are not full tiles would need a shuffle, so they are
    multiplied together.
    """
    narrow = inverse.astype(left.dtype)
    if block % tile_shape(left.dtype)[0]:
        return inverse - tile_dot(tile_dot(narrow, left).astype(left.dtype), narrow)
    lower = range(block, CHUNK, 2 * block)
    changing = jnp.concatenate([narrow[at : at + block] for at in lower])
    change = tile_dot(tile_dot(changing, left).astype(left.dtype), narrow)
    halves: list[jax.Array] = []
    for number, at in enumerate(lower):
        own = change[number * block : (number + 1) * block]
        halves += [inverse[at - block : at], inverse[at : at + block] - own]
    return jnp.concatenate(halves)
