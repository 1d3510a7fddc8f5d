"""Check the arguments of `flash_attention` and convert them for its implementations."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....errors import TPUKernelError, did_you_mean
from ...blocks.tiling import round_up
from .problem import FlashBlocks
from .spec import AttentionSpec, BlockMask, SegmentIds
from .visibility import ceil_div

AxisOrder = Literal["BSHD", "BHSD"]
_AXES = {"BSHD": "(B, S, {}, D)", "BHSD": "(B, {}, S, D)"}


def check_arrays(q: Any, k: Any, v: Any, *, layout: str) -> None:
    """Refuse queries, keys and values whose shapes do not match.

    Raises:
        TPUKernelError: With the shapes given and expected.
    """
    if layout not in _AXES:
        raise TPUKernelError(
            f"layout={layout!r} is unknown; expected {' or '.join(map(repr, _AXES))}."
            + did_you_mean(str(layout).upper(), _AXES)
        )
    if q.ndim != 4 or k.ndim != 4 or k.shape[:3] != v.shape[:3]:
        queries, keys = _AXES[layout].format("H"), _AXES[layout].format("KV")
        raise TPUKernelError(
            f"flash_attention takes q {queries} and k, v {keys}, but got {q.shape}, {k.shape} and "
            f"{v.shape}; keys and values need four axes, equal except for the width."
        )
    heads = layout.index("H")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[heads] % k.shape[heads]:
        raise TPUKernelError(
            f"queries {q.shape} and keys {k.shape} do not match: batch and head width must "
            f"be equal, and the heads of q (axis {heads}, layout={layout!r}) a multiple of those "
            "of k."
        )
    if not (q.dtype == k.dtype == v.dtype):
        raise TPUKernelError(
            f"q, k and v are {q.dtype.name}, {k.dtype.name} and {v.dtype.name}; cast them to one "
            "dtype."
        )


def check_rope(rope: Any, q: Any, k: Any) -> None:
    """Refuse tables that are not a pair, or too short or narrow for q (B, S, H, D).

    Raises:
        TPUKernelError: With the shapes given and expected.
    """
    if not isinstance(rope, tuple) or len(rope) != 2:
        raise TPUKernelError("rope= takes a pair of cosines and sines, as `rope_tables` returns.")
    longest = max(q.shape[1], k.shape[1])
    if any(table.shape[-2] < longest or table.shape[-1] * 2 != q.shape[3] for table in rope):
        raise TPUKernelError(
            f"the RoPE tables are {rope[0].shape} and {rope[1].shape}, but {longest} positions of "
            f"heads of {q.shape[3]} need ({longest}, {q.shape[3] // 2})."
        )


def check_sinks(sinks: Any, heads: int) -> None:
    """Refuse sinks that are not one score per query head.

    Raises:
        TPUKernelError: With the shapes given and expected.
    """
    if sinks is not None and sinks.shape != (heads,):
        raise TPUKernelError(
            f"sinks= has shape {sinks.shape}, but there are {heads} query heads; give ({heads},), "
            "one score per head."
        )


def check_chunk(spec: AttentionSpec, q: Any, k: Any, *, masked: bool) -> None:
    """Refuse chunks except in causal self-attention; q is (B, S, H, D).

    Raises:
        TPUKernelError: With the alternative.
    """
    if spec.chunk is None:
        return
    if spec.chunk < 1:
        raise TPUKernelError(f"chunk={spec.chunk} must be at least 1; None means no chunks.")
    if not spec.causal or q.shape[1] != k.shape[1] or masked:
        raise TPUKernelError(
            f"chunk={spec.chunk} is for causal attention without mask= and with as many queries as "
            "keys; state the chunks in mask= or segment_ids= instead."
        )


def check_sizes(window: int | None, soft_cap: float | None, block_size: int | None) -> None:
    """Refuse sizes that are out of range.

    Raises:
        TPUKernelError: With the value given and the valid ones.
    """
    if window is not None and window < 1:
        raise TPUKernelError(
            f"window={window} must be at least 1, a query's own key; None means no window."
        )
    if soft_cap is not None and soft_cap <= 0:
        raise TPUKernelError(f"soft_cap={soft_cap} must be positive; None switches it off.")
    if block_size is not None and block_size < 1:
        raise TPUKernelError(
            f"block_size={block_size} must be positive; None takes the tuned blocks."
        )


def equal_blocks(block_size: int) -> FlashBlocks:
    """Return blocks of that many tokens in both passes, rounded up to full lanes."""
    size = round_up(block_size, 128)
    return FlashBlocks(size, size, size, 1, size, size, size)


def read_segment_ids(
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None, q: Any, k: Any
) -> SegmentIds | None:
    """Return the ids of queries and keys, given as one array or a pair.

    Raises:
        TPUKernelError: Their shapes are not those of q and k.
    """
    if segment_ids is None:
        return None
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    expected = ((q.shape[0], q.shape[1]), (k.shape[0], k.shape[1]))
    if tuple(x.shape for x in pair) != expected:
        raise TPUKernelError(
            f"segment ids are {tuple(x.shape for x in pair)}, and queries and keys need "
            f"{expected[0]} and {expected[1]}; give a pair where the lengths differ."
        )
    return SegmentIds(*(x.astype(jnp.int32) for x in pair))


Mask = jax.Array | np.ndarray | BlockMask


class Masks(NamedTuple):
    """The meaning of a `mask=` argument; at most one of the three is given.

    Attributes:
        blocks: A block pattern that is known while tracing.
        scores: Booleans (B or 1, H or 1, queries or 1, keys).
        queries: Booleans (B or 1, queries or 1, H or 1, 1), equal for all keys. The result of a
            query with False is zero, which needs no kernel.
    """

    blocks: BlockMask | None = None
    scores: jax.Array | None = None
    queries: jax.Array | None = None


def read_mask(mask: Mask | None, q: Any, k: Any, *, block_size: int | None) -> Masks:
    """Tell masks of blocks from masks of scores; q is (B, S, H, D), k (B, S, KV, D).

    A shape is never ambiguous: a block has 128 tokens or more, so a block pattern broadcasts to the
    scores only if it is a single block, and then both mean the same.

    Raises:
        TPUKernelError: The mask is neither, or is not boolean.
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
            f"mask= takes booleans, True where a query may attend to a key, but got "
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
    return all(size in (1, wanted) for size, wanted in zip(padded, scores, strict=True))


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
