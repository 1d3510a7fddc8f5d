"""Attention of one token per row over the slots of a cache, which also adds the token.

In a step that adds one token, most bytes are read from the cache. XLA slices a layer out of the
stack, changes its layout and widens it, through HBM each time; and its scatter has another 8-bit
layout, into which it copies the full cache. This kernel reads the layer's slots in place, as narrow
as they are, and writes the tile with the token.

All heads of a row are one matmul: queries are on a block diagonal with zeros beside them, so that
the keys of all heads, which are side by side, pass the matrix unit once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tiling import LANES, Interpret, Ref
from ...blocks.vmem import vmem_limit_bytes
from .spec import AttentionSpec

# Bytes of keys or values per grid step: more steps cost their start, more bytes need VMEM.
BLOCK_BYTES = 2**22
MOST_ROWS = 5
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
    spec: AttentionSpec,
    *,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return attention (rows, heads, channels), and keys and values with the new token.

    Args:
        q: (rows, heads, channels) of the new tokens.
        new: Their keys and values, (rows, width), with heads side by side.
        slots: Keys and values (layers, rows, slots, width), which are updated in place.
        index: () number of the layer.
        positions: (rows,) of the new tokens; the slot is the position modulo the slots.
        spec: The attention, causal and without arrays.
        interpret: Run the kernel without a TPU.
    """
    keys, values = slots
    rows, heads, channels = q.shape
    room, width = keys.shape[2:]
    tile, (together, block) = _tile(keys), _block(keys)
    narrow = [array.astype(keys.dtype)[:, None] for array in new]

    def read(group: Any, step: Any, index: Any, positions: Any) -> tuple[Any, ...]:
        # Slots that no row has filled are not fetched; the block before stays.
        newest = positions[group * together]
        for row in range(1, together):
            newest = jnp.maximum(newest, positions[group * together + row])
        last = _quotient(jnp.minimum(newest, room - 1), block)
        return index[0], group, jnp.minimum(step, last), 0

    def of_rows(group: Any, step: Any, index: Any, positions: Any) -> tuple[Any, ...]:
        return group, 0, 0

    some_rows = pl.BlockSpec((together, heads, channels), of_rows)
    some_tokens = pl.BlockSpec((together, 1, width), of_rows)
    some_slots = pl.BlockSpec((1, together, block, width), read)
    in_place = pl.BlockSpec(memory_space=pl.ANY)
    cache_shape = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    # Both twice, and once more in the dtype of queries.
    used = 2 * together * block * width * (2 * keys.dtype.itemsize + q.dtype.itemsize)
    return pl.pallas_call(
        partial(_kernel, spec=spec, slots=room),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows // together, room // block),
            in_specs=[some_rows, some_tokens, some_tokens, some_slots, some_slots],
            out_specs=[some_rows, in_place, in_place],
            scratch_shapes=[
                pltpu.VMEM((together, heads, width), q.dtype),
                pltpu.VMEM((together, heads, width), jnp.float32),
                *(pltpu.VMEM((together, heads, LANES), jnp.float32) for _ in range(2)),
                pltpu.VMEM((2, together, tile, width), keys.dtype),
                pltpu.SemaphoreType.DMA((2, together)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), cache_shape, cache_shape],
        input_output_aliases={5: 1, 6: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(used, current_target()),
        ),
        interpret=interpret,
        name="attend_slots",
    )(index.reshape(1), positions, q, *narrow, keys, values)


def _tile(keys: jax.Array) -> int:
    """Return the slots of a tile of HBM, the unit of writes."""
    return 8 * 4 // keys.dtype.itemsize


def _block(keys: jax.Array) -> tuple[int, int]:
    """Return the rows and slots of a grid step."""
    rows, slots, width = keys.shape[1:]
    slot_bytes, block = width * keys.dtype.itemsize, slots
    while block * slot_bytes > BLOCK_BYTES and block % (2 * _tile(keys)) == 0:
        block //= 2
    together = max(n for n in range(1, MOST_ROWS + 1) if rows % n == 0)
    while together * block * slot_bytes > BLOCK_BYTES and together > 1:
        together = max(n for n in range(1, together) if rows % n == 0)
    return together, block


def _kernel(
    index: Ref,
    positions: Ref,
    q: Ref,
    new_key: Ref,
    new_value: Ref,
    keys: Ref,
    values: Ref,
    out: Ref,
    all_keys: Ref,
    all_values: Ref,
    queries: Ref,
    total: Ref,
    largest: Ref,
    weight: Ref,
    tiles: Ref,
    written: Ref,
    *,
    spec: AttentionSpec,
    slots: int,
) -> None:
    group, step = pl.program_id(0), pl.program_id(1)
    together, block, width = keys.shape[1:]
    heads, channels = q.shape[1:]
    size = tiles.shape[2]
    own = _own_channels(heads, width, channels)
    scale = spec.scale_of(channels)

    def adding(row: int, at: Any, start: Any) -> list[Any]:
        """Return the copies of a row's tiles to their places."""
        return [
            pltpu.make_async_copy(
                tiles.at[which, row],
                array.at[index[0], at, pl.ds(start, size)],
                written.at[which, row],
            )
            for which, array in enumerate((all_keys, all_values))
        ]

    def begin(row: int) -> None:
        """Start the softmax with the new token itself."""
        spread = jnp.concatenate([q[row]] * (width // channels), axis=1)
        queries[row] = jnp.where(own, spread, jnp.zeros_like(spread))
        wide = new_key[row].astype(jnp.float32)
        alone = jnp.sum(queries[row].astype(jnp.float32) * wide, axis=1, keepdims=True)
        largest[row] = jnp.broadcast_to(spec.cap(alone * scale)[0], largest.shape[1:])
        weight[row] = jnp.ones(weight.shape[1:], weight.dtype)
        total[row] = jnp.broadcast_to(new_value[row].astype(jnp.float32), total.shape[1:])

    def attend(row: int) -> None:
        position = positions[group * together + row]
        slot = _rest(position, slots)
        scores = jax.lax.dot_general(
            queries[row],
            keys[0, row].astype(q.dtype),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        behind = slot - step * block - jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        behind = jnp.where(behind < 0, behind + slots, behind)
        # After 0 come the tokens that the new token replaces.
        seen = (behind > 0) & (behind <= position)
        if spec.window is not None:
            seen &= behind < spec.window
        if spec.chunk is not None:
            seen &= behind <= _rest(position, spec.chunk)
        scores = jnp.where(seen, spec.cap(scores * scale)[0], _NEVER)
        before = largest[row, :, :1]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        shrunk = jnp.exp(before - now)
        weights = jnp.exp(scores - now)
        mixed = jax.lax.dot_general(
            weights.astype(q.dtype),
            values[0, row].astype(q.dtype),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        total[row] = total[row] * shrunk + mixed
        weight[row] = weight[row] * shrunk + jnp.sum(weights, axis=1, keepdims=True)
        largest[row] = jnp.broadcast_to(now, largest.shape[1:])

    def add(row: int) -> None:
        at = group * together + row
        slot = _rest(positions[at], slots)

        @pl.when(step == _quotient(slot, block))
        def _here() -> None:
            # Started one group ago, so usually complete.
            pl.when(group > 0)(lambda: _wait(adding(row, at, 0)))

            within = _rest(slot, size)
            start = pl.multiple_of(_rest(slot, block) - within, size)
            is_new = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) == within
            for which, (held, token) in enumerate(((keys, new_key), (values, new_value))):
                old = held[0, row, pl.ds(start, size)].astype(jnp.float32)
                merged = jnp.where(is_new, token[row].astype(jnp.float32), old)
                tiles[which, row] = merged.astype(tiles.dtype)
            for copy in adding(row, at, pl.multiple_of(slot - within, size)):
                copy.start()

    def end(row: int) -> None:
        result = jnp.where(own, total[row], 0.0) / weight[row, :, :1]
        only = result[:, :channels]
        for at in range(channels, width, channels):
            only += result[:, at : at + channels]
        out[row] = only.astype(out.dtype)

    # Each loop handles rows side by side, so that they fill each other's gaps.
    pl.when(step == 0)(lambda: _each(begin, together))
    _each(attend, together)
    _each(add, together)
    pl.when(step == pl.num_programs(1) - 1)(lambda: _each(end, together))

    is_last = (group == pl.num_programs(0) - 1) & (step == pl.num_programs(1) - 1)
    pl.when(is_last)(lambda: _each(lambda row: _wait(adding(row, 0, 0)), together))


def _wait(copies: list[Any]) -> None:
    for copy in copies:
        copy.wait()


def _rest(number: Any, of: int) -> Any:
    """Return the remainder; for powers of two by bits, without a division."""
    return number & (of - 1) if of.bit_count() == 1 else jax.lax.rem(number, of)


def _quotient(number: Any, by: int) -> Any:
    return number >> (by.bit_length() - 1) if by.bit_count() == 1 else jax.lax.div(number, by)


def _each(function: Callable[[int], None], rows: int) -> None:
    for row in range(rows):
        function(row)


def _own_channels(heads: int, width: int, channels: int) -> jax.Array:
    """Return (heads, width) booleans: whether a channel belongs to a query's head."""
    group = heads * channels // width
    head = jax.lax.broadcasted_iota(jnp.int32, (heads, width), 0)
    channel = jax.lax.broadcasted_iota(jnp.int32, (heads, width), 1)
    return _quotient(head, group) == _quotient(channel, channels)
