"""What callers give `flash_attention` besides a mask: checked, and as implementations take it."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError, did_you_mean
from ...blocks.tiling import round_up
from .problem import FlashBlocks, SegmentIds

AxisOrder = Literal["BSHD", "BHSD"]
_AXES = {"BSHD": "(B, S, {}, D)", "BHSD": "(B, {}, S, D)"}


def check_arrays(q: Any, k: Any, v: Any, *, layout: str) -> None:
    """Refuse queries, keys and values that do not go together.

    Raises:
        TPUKernelError: With what was seen and expected.
    """
    if layout not in _AXES:
        raise TPUKernelError(
            f"layout={layout!r} is not known; it is {' or '.join(map(repr, _AXES))}."
            + did_you_mean(str(layout).upper(), _AXES)
        )
    if q.ndim != 4 or k.ndim != 4 or k.shape[:3] != v.shape[:3]:
        queries, keys = _AXES[layout].format("H"), _AXES[layout].format("KV")
        raise TPUKernelError(
            f"flash_attention takes q {queries} and k, v {keys} and got {q.shape}, {k.shape} and "
            f"{v.shape}; give keys and values four axes, equal but for their width."
        )
    heads = layout.index("H")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[heads] % k.shape[heads]:
        raise TPUKernelError(
            f"queries {q.shape} and keys {k.shape} do not go together: batch and head width must "
            f"be equal, and the heads of q (axis {heads}, layout={layout!r}) a multiple of those "
            "of k."
        )
    if not (q.dtype == k.dtype == v.dtype):
        raise TPUKernelError(
            f"q, k and v are {q.dtype.name}, {k.dtype.name} and {v.dtype.name}; cast them to one "
            "dtype."
        )


def check_rope(rope: Any, q: Any, k: Any) -> None:
    """Refuse tables that are no pair, or too short or narrow for q (B, S, H, D).

    Raises:
        TPUKernelError: With what was seen and expected.
    """
    if not isinstance(rope, tuple) or len(rope) != 2:
        raise TPUKernelError("rope= takes a pair, cosines and sines, as `rope_tables` gives it.")
    longest = max(q.shape[1], k.shape[1])
    if any(table.shape[-2] < longest or table.shape[-1] * 2 != q.shape[3] for table in rope):
        raise TPUKernelError(
            f"the RoPE tables are {rope[0].shape} and {rope[1].shape}, and {longest} positions of "
            f"heads of {q.shape[3]} need ({longest}, {q.shape[3] // 2})."
        )


def check_sinks(sinks: Any, heads: int) -> None:
    """Refuse sinks that are not one score for each of so many query heads.

    Raises:
        TPUKernelError: With what was seen and expected.
    """
    if sinks is not None and sinks.shape != (heads,):
        raise TPUKernelError(
            f"sinks= has shape {sinks.shape} and there are {heads} query heads; give ({heads},), "
            "one score for each."
        )


def check_chunk(chunk: int | None, q: Any, k: Any, *, causal: bool, masked: bool) -> None:
    """Refuse chunks of anything but causal self-attention; q is (B, S, H, D).

    Raises:
        TPUKernelError: With what was seen and expected.
    """
    if chunk is None:
        return
    if chunk < 1:
        raise TPUKernelError(f"chunk={chunk} has no room for a token; None has no chunks.")
    if not causal or q.shape[1] != k.shape[1] or masked:
        raise TPUKernelError(
            f"chunk={chunk} is for causal attention without mask=, of as many queries as keys; "
            "say the chunks in mask= or segment_ids= instead."
        )


def check_sizes(window: int | None, soft_cap: float | None, block_size: int | None) -> None:
    """Refuse numbers that mean nothing.

    Raises:
        TPUKernelError: With what was seen and expected.
    """
    if window is not None and window < 1:
        raise TPUKernelError(
            f"window={window} leaves a query not even its own key; give 1 or more, or None for "
            "no window."
        )
    if soft_cap is not None and soft_cap <= 0:
        raise TPUKernelError(f"soft_cap={soft_cap} must be positive; None switches it off.")
    if block_size is not None and block_size < 1:
        raise TPUKernelError(
            f"block_size={block_size} must be positive; None takes the tuned blocks."
        )


def equal_blocks(block_size: int) -> FlashBlocks:
    """Blocks of that many tokens in both passes, rounded up to whole lanes."""
    size = round_up(block_size, 128)
    return FlashBlocks(size, size, size, 1, size, size, size)


def read_segment_ids(
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None, q: Any, k: Any
) -> SegmentIds | None:
    """One array or a pair as the ids of queries and keys.

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
