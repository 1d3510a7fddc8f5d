"""The masks that callers may give: patterns of blocks, and a boolean for every score."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....errors import TPUKernelError
from .visibility import BlockMask, ceil_div

Mask = jax.Array | np.ndarray | BlockMask


class Masks(NamedTuple):
    """What one `mask=` argument means; at most one of the three is given.

    Attributes:
        blocks: A pattern that is known while tracing.
        scores: Booleans (B or 1, H or 1, queries or 1, keys).
        queries: Booleans (B or 1, queries or 1, H or 1, 1), where all keys share one: the result
            of a query with False is zero, which no kernel needs to know.
    """

    blocks: BlockMask | None = None
    scores: jax.Array | None = None
    queries: jax.Array | None = None


def read_mask(mask: Mask | None, q: Any, k: Any, *, block_size: int | None) -> Masks:
    """Tell masks of blocks from those of scores; q is (B, S, H, D), k (B, S, KV, D).

    No shape means both: a block has 128 tokens or more, so a pattern of blocks broadcasts to the
    scores only where it is a single block, and then both mean the same.

    Raises:
        TPUKernelError: The mask fits neither, or is not boolean.
    """
    if mask is None:
        return Masks()
    scores = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if isinstance(mask, BlockMask):
        return Masks(blocks=_covering(mask, scores))
    mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
    if not _broadcasts(mask.shape, scores):
        return Masks(blocks=_pattern(mask, scores, block_size))
    if mask.dtype != bool:
        raise TPUKernelError(
            f"mask= takes booleans, True where a query may attend to a key, and got "
            f"{mask.dtype.name}; compare it, e.g. mask == 0 for one that is added to scores."
        )
    dense = jnp.asarray(mask).reshape((1,) * (4 - mask.ndim) + mask.shape)
    if dense.shape[3] == scores[3]:
        return Masks(scores=dense)
    return Masks(queries=dense.swapaxes(1, 2))


def _broadcasts(shape: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    if len(shape) > 4:
        return False
    padded = (1,) * (4 - len(shape)) + tuple(shape)
    return all(size in (1, whole) for size, whole in zip(padded, scores, strict=True))


def _pattern(mask: Any, scores: tuple[int, ...], block_size: int | None) -> BlockMask:
    q_len, kv_len = scores[2:]
    size = block_size or (ceil_div(q_len, mask.shape[0]) if mask.ndim == 2 else 128)
    blocks = (ceil_div(q_len, size), ceil_div(kv_len, size))
    if size % 128 or mask.shape != blocks:
        known = (
            f"each of {blocks} blocks of {size} tokens" if block_size else "each block of tokens"
        )
        raise TPUKernelError(
            f"mask= has shape {mask.shape}, which neither broadcasts to (batch, heads, queries, "
            f"keys) = {scores} nor has a value for {known}, in multiples of 128; reshape it, or "
            "give a BlockMask."
        )
    return BlockMask.from_array(mask, block_size=size)


def _covering(mask: BlockMask, scores: tuple[int, ...]) -> BlockMask:
    shape = mask.to_array().shape
    expected = tuple(ceil_div(length, mask.block_size) for length in scores[2:])
    if shape != expected:
        raise TPUKernelError(
            f"a mask of {shape} blocks of {mask.block_size} tokens does not cover {scores[2]} "
            f"queries and {scores[3]} keys; expected {expected} blocks."
        )
    return mask
