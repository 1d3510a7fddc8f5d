"""Attention of one token a row over the slots of a cache, to which the same pass adds the token.

Of a step that adds one token, the cache is most of what is read. XLA cuts a layer's part out of the
stack, changes its layout, and widens it, through HBM each time; and its scatter has a layout of its
own for eight bits, into which it copies the whole cache. This kernel reads the layer's slots where
they lie, as narrow as they are, and writes the tile that the token falls into.

All heads of a row are one product: queries stand on a diagonal of blocks, zeros beside them, so
that keys of all heads, which lie side by side, go through the matrix unit once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tiling import LANES
from ...blocks.vmem import vmem_limit_bytes
from ..gemm.tile import Interpret

# Of keys or values in one grid step: more steps cost their start, more bytes wait for the first.
BLOCK_BYTES = 2**20
_NEVER = -1e30


def can_attend_slots(q: jax.Array, keys: jax.Array, values: jax.Array) -> bool:
    """Whether the kernel takes q (rows, heads, channels) and slots (layers, rows, slots, width)."""
    width, slots = keys.shape[3], keys.shape[2]
    return (
        values.shape == keys.shape
        and q.shape[2] % LANES == 0
        and width % q.shape[2] == 0
        and slots % _tile(keys) == 0
    )


def attend_slots_adding(
    q: jax.Array,
    new: tuple[jax.Array, jax.Array],
    slots: tuple[jax.Array, jax.Array],
    index: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention (rows, heads, channels), and keys and values that hold the new token.

    Args:
        q: (rows, heads, channels) of the new tokens.
        new: Their keys and values, (rows, width); heads lie side by side.
        slots: Keys and values (layers, rows, slots, width), which are written in place.
        index: () of the layer.
        positions: (rows,) of the new tokens; the slot is the position, modulo the slots.
        scale: Of the scores.
        window: How many tokens back one attends to, itself included (None: all).
        chunk: A token attends to those of its own chunk.
        soft_cap: Scores are bent by a tanh to stay within ± this.
        interpret: Run the kernel's meaning without a TPU.
    """
    keys, values = slots
    rows, heads, channels = q.shape
    room, width = keys.shape[2:]
    tile, block = _tile(keys), _block(keys)
    narrow = [one.astype(keys.dtype)[:, None] for one in new]

    def last(row: Any, positions: Any) -> Any:
        return jax.lax.div(jnp.minimum(positions[row], room - 1), block)

    def read(row: Any, step: Any, index: Any, positions: Any) -> tuple[Any, ...]:
        # What is not filled yet is not fetched: the block before stays.
        return index[0], row, jnp.minimum(step, last(row, positions)), 0

    def written(row: Any, step: Any, index: Any, positions: Any) -> tuple[Any, ...]:
        return index[0], row, jax.lax.div(jax.lax.rem(positions[row], room), tile), 0

    def of_row(row: Any, step: Any, index: Any, positions: Any) -> tuple[Any, ...]:
        return row, 0, 0

    one_row = pl.BlockSpec((1, heads, channels), of_row)
    one_token = pl.BlockSpec((1, 1, width), of_row)
    some_slots = pl.BlockSpec((1, 1, block, width), read)
    one_tile = pl.BlockSpec((1, 1, tile, width), written)
    whole = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    used = 2 * 2 * block * width * (keys.dtype.itemsize + 4)
    return pl.pallas_call(
        partial(_kernel, scale=scale, window=window, chunk=chunk, soft_cap=soft_cap, slots=room),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, room // block),
            in_specs=[one_row, one_token, one_token, some_slots, some_slots],
            out_specs=[one_row, one_tile, one_tile],
            scratch_shapes=[
                pltpu.VMEM((heads, width), q.dtype),
                pltpu.VMEM((heads, width), jnp.float32),
                *(pltpu.VMEM((heads, LANES), jnp.float32) for _ in range(2)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), whole, whole],
        input_output_aliases={5: 1, 6: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(used, current_target()),
        ),
        interpret=interpret,
        name="attend_slots",
    )(index.reshape(1), positions, q, *narrow, keys, values)


def _tile(keys: jax.Array) -> int:
    """Slots of a tile of HBM: what a block that is written must be made of."""
    return 8 * 4 // keys.dtype.itemsize


def _block(keys: jax.Array) -> int:
    """Slots of a grid step."""
    slots, width = keys.shape[2:]
    block = slots
    while block * width * keys.dtype.itemsize > BLOCK_BYTES and block % (2 * _tile(keys)) == 0:
        block //= 2
    return block


def _kernel(
    index: Any,
    positions: Any,
    q: Any,
    new_key: Any,
    new_value: Any,
    keys: Any,
    values: Any,
    out: Any,
    key_tile: Any,
    value_tile: Any,
    queries: Any,
    total: Any,
    largest: Any,
    weight: Any,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    slots: int,
) -> None:
    del index
    row, step = pl.program_id(0), pl.program_id(1)
    position = positions[row]
    slot = jax.lax.rem(position, slots)
    block, width = keys.shape[2:]
    heads, channels = q.shape[1:]
    own = _own_channels(heads, width, channels)

    def scores_of(held: jax.Array) -> jax.Array:
        found = jax.lax.dot_general(
            queries[...], held, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        found *= scale
        return found if soft_cap is None else soft_cap * jnp.tanh(found / soft_cap)

    @pl.when(step == 0)
    def _begin() -> None:
        """The token itself is the first that is attended to."""
        spread = jnp.concatenate([q[0]] * (width // channels), axis=1)
        queries[...] = jnp.where(own, spread, jnp.zeros_like(spread))
        wide = new_key[0].astype(jnp.float32)
        alone = jnp.sum(queries[...].astype(jnp.float32) * wide, axis=1, keepdims=True) * scale
        if soft_cap is not None:
            alone = soft_cap * jnp.tanh(alone / soft_cap)
        largest[...] = jnp.broadcast_to(alone, largest.shape)
        weight[...] = jnp.ones(weight.shape, weight.dtype)
        total[...] = jnp.broadcast_to(new_value[0].astype(jnp.float32), total.shape)

    @pl.when(step * block <= position)
    def _attend() -> None:
        scores = scores_of(keys[0, 0].astype(q.dtype))
        place = jax.lax.broadcasted_iota(jnp.int32, (1, block), 1) + step * block
        behind = slot - place
        behind = jnp.where(behind < 0, behind + slots, behind)
        # Behind 0 lies what the new token takes the place of.
        seen = (behind > 0) & (behind <= position)
        if window is not None:
            seen &= behind < window
        if chunk is not None:
            seen &= behind <= jax.lax.rem(position, chunk)
        scores = jnp.where(seen, scores, _NEVER)
        before = largest[:, :1]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        shrunk = jnp.exp(before - now)
        weights = jnp.where(seen, jnp.exp(scores - now), 0.0)
        mixed = jax.lax.dot_general(
            weights.astype(q.dtype),
            values[0, 0].astype(q.dtype),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        total[...] = total[...] * shrunk + mixed
        weight[...] = weight[...] * shrunk + jnp.sum(weights, axis=1, keepdims=True)
        largest[...] = jnp.broadcast_to(now, largest.shape)

    @pl.when(step == jax.lax.div(slot, block))
    def _add() -> None:
        for held, token, tile in ((keys, new_key, key_tile), (values, new_value, value_tile)):
            size = tile.shape[2]
            within = jax.lax.rem(slot, size)
            start = pl.multiple_of(jax.lax.rem(slot, block) - within, size)
            is_new = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) == within
            old = held[0, 0, pl.ds(start, size)]
            wide = jnp.where(is_new, token[0].astype(jnp.float32), old.astype(jnp.float32))
            tile[0, 0] = wide.astype(tile.dtype)

    @pl.when(step == pl.num_programs(1) - 1)
    def _end() -> None:
        result = jnp.where(own, total[...], 0.0) / weight[:, :1]
        parts = [result[:, at : at + channels] for at in range(0, width, channels)]
        out[0] = sum(parts[1:], parts[0]).astype(out.dtype)


def _own_channels(heads: int, width: int, channels: int) -> jax.Array:
    """(heads, width) whether a channel of all keys side by side belongs to a query's head."""
    group = heads * channels // width
    head = jax.lax.broadcasted_iota(jnp.int32, (heads, width), 0)
    channel = jax.lax.broadcasted_iota(jnp.int32, (heads, width), 1)
    return jax.lax.div(head, group) == jax.lax.div(channel, channels)
