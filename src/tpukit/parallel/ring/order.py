"""Which tokens of a long sequence each device of a context axis has."""

from typing import Literal, TypeAlias, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...errors import ShardingError, did_you_mean

RingLayout: TypeAlias = Literal["contiguous", "zigzag"]


def check_layout(layout: str) -> None:
    """Raise ShardingError unless `layout` is one of the known ones."""
    known = get_args(RingLayout)
    if layout not in known:
        raise ShardingError(
            f"Sequence layout '{layout}' is unknown; known are {', '.join(known)}."
            f"{did_you_mean(layout, known)}"
        )


def pieces_a_shard(layout: RingLayout) -> int:
    """Return the runs of consecutive tokens per device."""
    return 2 if layout == "zigzag" else 1


def check_length(length: int, *, shards: int, layout: RingLayout, axis: str) -> None:
    """Raise ShardingError unless a sequence can be split evenly."""
    pieces = shards * pieces_a_shard(layout)
    if length % pieces:
        below, above = length // pieces * pieces, -(-length // pieces) * pieces
        raise ShardingError(
            f"A sequence of {length} cannot be split over '{axis}'={shards} in the {layout} "
            f"layout: it must be a multiple of {pieces}, such as {below or above} or {above}."
        )


def local_positions(shard: Array, length: int, *, shards: int, layout: RingLayout) -> Array:
    """Return the positions in the full sequence of the `length` tokens on device `shard`."""
    if layout == "contiguous":
        return shard * length + jnp.arange(length)
    half = length // 2
    first = shard * half + jnp.arange(half)
    last = (2 * shards - 1 - shard) * half + jnp.arange(half)
    return jnp.concatenate([first, last])


def zigzag_order(length: int, shards: int) -> np.ndarray:
    """Return the position of every token once the sequence is in zigzag order.

    Device i of n has pieces i and 2n-1-i of 2n. Under a causal mask early pieces attend to little
    and late ones to much, so every device gets the same work; in the contiguous layout the last
    device has twice the average work and the others wait for it.
    """
    check_length(length, shards=shards, layout="zigzag", axis="context")
    pieces = np.arange(length).reshape(2 * shards, -1)
    order = np.stack([pieces[:shards], pieces[: shards - 1 : -1]], axis=1)
    return order.reshape(-1)


def to_zigzag(x: Array, shards: int, *, dim: int = 1) -> Array:
    """Put the sequence dimension in zigzag order: tokens, targets and positions alike."""
    return jnp.take(x, zigzag_order(x.shape[dim], shards), axis=dim)


def from_zigzag(x: Array, shards: int, *, dim: int = 1) -> Array:
    """Undo `to_zigzag`."""
    return jnp.take(x, np.argsort(zigzag_order(x.shape[dim], shards)), axis=dim)
