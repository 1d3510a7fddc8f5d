"""The gated delta rule as TPU kernels: the state stays in VMEM from the first token to the last.

One grid step is a chunk of some heads, as long as the lanes are wide. The forward pass writes only
its results. For the gradients it runs again, and keeps the state before each chunk and the inverse
of its system.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ....annotations import PyTree
from ...blocks.tiling import Interpret, Ref, tile_dot
from .forward import run_again, run_forward
from .operands import CHUNK, OP_NAME, RATES, DeltaBlocks, Operands, head_rates, places, unit
from .xla import DeltaResiduals

# Rows of the gradients of rates, per head: of G, and of beta.
OF_SUMS, OF_BETA = 0, 1


def run_backward(
    operands: Operands, given: DeltaResiduals, d_out: jax.Array, d_last: jax.Array
) -> tuple[jax.Array | None, ...]:
    """Return the gradients of q, k, v, g, beta and the first state."""
    states, inverses = run_again(operands, given)
    width, value_width = operands.state
    key_heads, heads = given.k.shape[2], given.v.shape[2]
    length = operands.chunks * CHUNK
    window = partial(operands.window, backwards=True)
    of_keys = window(CHUNK, operands.key_heads * width, of="tokens")
    of_values = window(CHUNK, operands.heads * value_width, of="tokens")
    of_rates = window(RATES * operands.heads, CHUNK, of="rates")
    of_state = window(operands.heads, width, value_width, of="state")
    keys = jax.ShapeDtypeStruct((operands.batch, length, key_heads * width), given.q.dtype)
    values = jax.ShapeDtypeStruct((operands.batch, length, heads * value_width), given.v.dtype)
    numbers = jax.ShapeDtypeStruct((operands.batch, heads * RATES, length), jnp.float32)
    last = operands.pad_state(d_last)
    dq, dk, dv, d_rates, d_first = operands.call(
        partial(_kernel, operands=operands),
        f"{OP_NAME}_backward",
        [
            (operands.side_by_side(given.q), of_keys),
            (operands.side_by_side(given.k), of_keys),
            (operands.side_by_side(given.v), of_values),
            (operands.rates(given), of_rates),
            (states, window(operands.heads, width, value_width, of="kept")),
            (inverses, window(operands.heads, CHUNK, CHUNK, of="kept")),
            (operands.side_by_side(d_out.astype(given.v.dtype)), of_values),
            (last, of_state),
        ],
        [
            *[(keys, of_keys)] * 2,
            (values, of_values),
            (numbers, of_rates),
            (jax.ShapeDtypeStruct(last.shape, jnp.float32), of_state),
        ],
    )
    dq, dk = (operands.apart(x, heads=key_heads, width=operands.width) for x in (dq, dk))
    dv = operands.apart(dv, heads=heads, width=operands.value_width)
    # (b, h rate, n i) -> (rate, b, n, i, h)
    by_rate = d_rates.reshape(operands.batch, heads, RATES, operands.chunks, CHUNK)
    by_rate = by_rate.transpose(2, 0, 3, 4, 1)
    # A token's g is in the sums of all later tokens in the chunk, and in its own.
    dg = jax.lax.cumsum(by_rate[OF_SUMS], axis=2, reverse=True)
    dg, d_beta = (
        x.reshape(operands.batch, length, heads)[:, : operands.tokens]
        for x in (dg, by_rate[OF_BETA])
    )
    d_state = None
    if given.initial_state is not None:
        d_state = d_first[:, :, : operands.width, : operands.value_width]
        d_state = d_state.astype(given.initial_state.dtype)
    return dq, dk, dv, dg.astype(given.g.dtype), d_beta.astype(given.beta.dtype), d_state


def _kernel(
    q: Ref,
    k: Ref,
    v: Ref,
    rates: Ref,
    states: Ref,
    inverses: Ref,
    d_out: Ref,
    d_last: Ref,
    dq: Ref,
    dk: Ref,
    dv: Ref,
    d_rates: Ref,
    d_first: Ref,
    d_state: Ref,
    *,
    operands: Operands,
) -> None:
    step, steps = pl.program_id(2), pl.num_programs(2)

    @pl.when(step == 0)
    def _start() -> None:
        d_state[...] = d_last[0]

    narrow = q.dtype
    width, value_width = operands.state
    scale = operands.width**-0.5
    row, column = places()
    rates_of = head_rates(rates[0])
    columns: list[jax.Array] = []
    from_rows: list[jax.Array] = []
    for head in range(operands.key_heads):
        lanes = slice(head * width, (head + 1) * width)
        (queries, by_query), (keys, by_key) = unit(q[0, :, lanes]), unit(k[0, :, lanes])
        pair = jnp.concatenate([queries * scale, keys]).astype(narrow)
        products = tile_dot(pair, pair[CHUNK:], contract=(1, 1))
        scores, overlaps = products[:CHUNK], products[CHUNK:]
        d_pair = jnp.zeros((2 * CHUNK, width), jnp.float32)
        d_scores = d_overlaps = jnp.zeros((CHUNK, CHUNK), jnp.float32)
        for number in range(head * operands.group, (head + 1) * operands.group):
            own, own_lanes = (
                rates_of[number],
                slice(number * value_width, (number + 1) * value_width),
            )
            decay = own.decays(row >= column, cuts=operands.cuts)
            before, inverse, later = states[0, 0, number], inverses[0, 0, number], d_state[number]
            d_result = d_out[0, :, own_lanes]
            # Recompute the forward pass as far as needed.
            held = tile_dot(pair, before)
            missing = v[0, :, own_lanes].astype(jnp.float32) - own.fade * held[CHUNK:]
            written = tile_dot(inverse, (own.beta * missing).astype(narrow))
            # What each token wrote, and its inputs.
            kept = tile_dot(pair[CHUNK:], later.astype(narrow))
            weights = (scores * decay).astype(narrow)
            d_written = tile_dot(weights, d_result, contract=(0, 0)) + own.rest * kept
            d_scaled = tile_dot(inverse, d_written.astype(narrow), contract=(0, 0))
            d_missing = own.beta * d_scaled
            dv[0, :, own_lanes] = d_missing.astype(dv.dtype)
            # Scores and the system.
            written_narrow = written.astype(narrow)
            own_scores = decay * tile_dot(d_result, written_narrow, contract=(1, 1))
            system = tile_dot(d_scaled.astype(narrow), written_narrow, contract=(1, 1))
            system = jnp.where(row > column, -decay * system, 0.0)
            d_scores = d_scores + own_scores
            d_overlaps = d_overlaps + own.beta * system
            # The state, and what it gave and received.
            d_result = d_result.astype(jnp.float32)
            d_held = jnp.concatenate([own.fade * d_result, -own.fade * d_missing]).astype(narrow)
            d_pair = d_pair + tile_dot(d_held, before, contract=(1, 1))
            lasting = (own.rest * written).astype(narrow)
            d_keys = tile_dot(lasting, later.astype(narrow), contract=(1, 1))
            d_pair = d_pair + jnp.concatenate([jnp.zeros_like(d_keys), d_keys])
            d_state[number] = own.fade_whole * later + tile_dot(pair, d_held, contract=(0, 0))
            # Rates.
            with_beta = system * overlaps
            both = own.beta * with_beta + own_scores * scores
            from_state = own.fade * _across(d_result * held[:CHUNK] - d_missing * held[CHUNK:])
            until_end = own.rest * _across(written * kept)
            over_chunk = own.fade_whole * jnp.sum(before.astype(jnp.float32) * later, keepdims=True)
            at_end = jnp.where(
                row[:, :1] == CHUNK - 1, over_chunk + jnp.sum(until_end, axis=0, keepdims=True), 0.0
            )
            columns.append(_across(both) + from_state - until_end + at_end)
            columns.append(_across(with_beta) + _across(d_scaled * missing))
            from_rows.append(jnp.sum(both, axis=0, keepdims=True))
        d_scores, queries_narrow = d_scores.astype(narrow), pair[:CHUNK]
        symmetric = (d_overlaps + d_overlaps.T).astype(narrow)
        d_queries = d_pair[:CHUNK] + tile_dot(d_scores, pair[CHUNK:])
        d_keys = d_pair[CHUNK:] + tile_dot(symmetric, pair[CHUNK:])
        d_keys = d_keys + tile_dot(d_scores, queries_narrow, contract=(0, 0))
        dq[0, :, lanes] = _through_unit(scale * d_queries, queries, by_query).astype(dq.dtype)
        dk[0, :, lanes] = _through_unit(d_keys, keys, by_key).astype(dk.dtype)
    _write_rates(d_rates, columns, from_rows)

    @pl.when(step == steps - 1)
    def _finish() -> None:
        d_first[0] = d_state[...]


def _write_rates(d_rates: Ref, columns: list[jax.Array], from_rows: list[jax.Array]) -> None:
    """Write columns (C, 1), two per head, as rows of a head's rates, less the sums over rows."""
    count = d_rates.shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, count), 1)
    side_by_side = jnp.zeros((CHUNK, count), jnp.float32)
    for number, values in enumerate(columns):
        at = RATES * (number // 2) + (OF_SUMS, OF_BETA)[number % 2]
        side_by_side = jnp.where(lane == at, values, side_by_side)
    d_rates[0] = side_by_side.T
    for number, values in enumerate(from_rows):
        at = RATES * number + OF_SUMS
        d_rates[0, at : at + 1] -= values


def _across(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1, keepdims=True)


def _through_unit(d: jax.Array, unit: jax.Array, factor: jax.Array) -> jax.Array:
    """Return the gradient of rows from that of the normalised rows."""
    return factor * (d - unit * _across(unit * d))


def forward(
    *arrays: PyTree,
    chunk: int | None = None,
    blocks: DeltaBlocks | None = None,
    interpret: Interpret = False,
) -> tuple[tuple[jax.Array, jax.Array], DeltaResiduals]:
    """Return the result and the last state (see `reference.gated_delta`), and the arguments."""
    del chunk
    given = DeltaResiduals(*arrays)
    return run_forward(Operands.of(given, blocks, interpret), given), given


def backward(
    residuals: DeltaResiduals,
    cotangent: tuple[jax.Array, jax.Array],
    *,
    chunk: int | None = None,
    blocks: DeltaBlocks | None = None,
    interpret: Interpret = False,
) -> tuple[jax.Array | None, ...]:
    """Return the gradients of all arguments but the starts."""
    del chunk
    operands = Operands.of(residuals, blocks, interpret)
    return *run_backward(operands, residuals, *cotangent), None
