"""`flash_attention`: attention that never holds the score matrix, on TPU, GPU and CPU."""

from typing import Any

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError
from ...blocks.tiling import round_up
from ...registry.op import PALLAS_TPU, REFERENCE, find_implementation
from ..rope.tables import RopeTables
from .differentiation import OP_NAME, XLA, attend_with_gradient
from .gpu import cudnn_attention, cudnn_is_here, why_not_cudnn
from .problem import FlashBlocks, SegmentIds
from .visibility import BlockMask

CUDNN = "cudnn"
NAMES: tuple[str, ...] = (PALLAS_TPU, CUDNN, XLA, REFERENCE)


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Any = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    rope: tuple[jax.Array, jax.Array] | None = None,
    use_flash: bool = True,
    implementation: str | None = None,
    blocks: FlashBlocks | None = None,
    block_size: int | None = None,
) -> jax.Array:
    """Attention of q (B, S, H, D) over k, v (B, S, KV, D) -> (B, S, H, D).

    Without a word about masks every query attends to every key, as in
    `jax.nn.dot_product_attention` and torch's `scaled_dot_product_attention`. Positions of
    queries and keys both count from 0, also where the lengths differ. The result of a query that
    may attend to no key is zero.

    Args:
        q: Queries, in float32 or bfloat16 for the TPU kernel.
        k: Keys; H must be a multiple of KV.
        v: Values.
        causal: Whether query i attends to keys j <= i only.
        window: Query i attends to keys j with |i - j| < window only: with `causal` to itself and
            the window - 1 keys before it, without to as many behind it as well. In jax and
            flash-attn that is a window of (window - 1, 0) or (window - 1, window - 1).
        mask: A `BlockMask`, or a numpy array of booleans with one for each block of the score
            matrix, whose blocks must then be of `block_size` tokens, or divide the lengths.
        segment_ids: (B, S) numbers that keep packed documents apart, or a pair of them for
            queries and keys.
        soft_cap: Scores are bent by a tanh to stay within ± this.
        scale: Of the scores; `D ** -0.5` by default.
        rope: Cosines and sines of the positions, (S, D / 2) or (B, S, D / 2): queries and keys
            are turned inside the kernel. They have no gradient.
        use_flash: False computes the whole score matrix in plain jnp.
        implementation: "pallas_tpu", "cudnn", "xla" or "reference"; None takes the kernel on
            TPU, cuDNN on GPU where it can, and rows of the score matrix in turn elsewhere.
        blocks: Of the TPU kernel; None takes the tuned ones.
        block_size: Short for equal blocks of that many tokens.

    Raises:
        TPUKernelError: The shapes do not fit each other, or the implementation asked for cannot.
    """
    if implementation is not None:
        find_implementation(OP_NAME, dict.fromkeys(NAMES), implementation)
    _check_shapes(q, k, v, rope=rope)
    _check_sizes(window, soft_cap, block_size)
    sparse = _block_mask(mask, q, k, block_size)
    ids = _segment_ids(segment_ids, q, k)
    if block_size is not None and blocks is None:
        size = round_up(block_size, 128)
        blocks = FlashBlocks(size, size, size, 1, size, size, size)
    if not use_flash:
        if implementation not in (None, REFERENCE):
            raise TPUKernelError(
                f"use_flash=False computes the whole score matrix, and implementation="
                f"'{implementation}' does not; give one of the two."
            )
        implementation = REFERENCE
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "mask": sparse,
        "soft_cap": soft_cap,
        "scale": scale,
    }
    turned = None if rope is None else RopeTables(*rope)
    arrays = (q, k, v, ids, turned)
    if implementation == CUDNN:
        return cudnn_attention(*arrays, **options)
    kernel_can = q.dtype in (jnp.float32, jnp.bfloat16)
    if implementation == PALLAS_TPU and not kernel_can:
        raise TPUKernelError(
            f"the TPU kernel computes in float32 or bfloat16 and the queries are {q.dtype.name}; "
            "cast them, or use implementation='xla'."
        )

    def elsewhere(*arrays: Any) -> Any:
        return attend_with_gradient(
            *arrays,
            implementation=implementation,
            on_tpu=PALLAS_TPU if kernel_can else XLA,
            on_gpu=XLA,
            elsewhere=XLA,
            options=options,
            pallas_options={"blocks": blocks},
        )

    without = why_not_cudnn(
        q, causal=causal, window=window, mask=sparse, segment_ids=ids, soft_cap=soft_cap
    )
    if implementation is not None or without is not None or not cudnn_is_here():
        return elsewhere(*arrays)

    def on_gpu(*arrays: Any) -> Any:
        return cudnn_attention(*arrays, **options)

    # Outside of the shared gradient, because cuDNN's own keeps residuals of its own.
    return jax.lax.platform_dependent(*arrays, cuda=on_gpu, default=elsewhere)


def _check_shapes(q: Any, k: Any, v: Any, *, rope: Any) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise TPUKernelError(
            f"flash_attention takes q (B, S, H, D) and k, v (B, S, KV, D) and got {q.shape}, "
            f"{k.shape} and {v.shape}; give keys and values the same four axes."
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise TPUKernelError(
            f"queries {q.shape} and keys {k.shape} do not go together: batch and head width must "
            "be equal, and the heads of q a multiple of those of k."
        )
    if not (q.dtype == k.dtype == v.dtype):
        raise TPUKernelError(
            f"q, k and v are {q.dtype.name}, {k.dtype.name} and {v.dtype.name}; cast them to one "
            "dtype."
        )
    longest = max(q.shape[1], k.shape[1])
    if rope is not None and (not isinstance(rope, tuple) or len(rope) != 2):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TPUKernelError("rope= takes a pair, cosines and sines, as `rope_tables` gives it.")
    if rope is not None and any(
        table.shape[-2] < longest or table.shape[-1] * 2 != q.shape[3] for table in rope
    ):
        raise TPUKernelError(
            f"the RoPE tables are {rope[0].shape} and {rope[1].shape}, and {longest} positions of "
            f"heads of {q.shape[3]} need ({longest}, {q.shape[3] // 2})."
        )


def _check_sizes(window: int | None, soft_cap: float | None, block_size: int | None) -> None:
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


def _block_mask(mask: Any, q: Any, k: Any, block_size: int | None) -> BlockMask | None:
    if mask is None:
        return None
    lengths = (q.shape[1], k.shape[1])
    if not isinstance(mask, BlockMask):
        rows = mask.shape[0] if getattr(mask, "ndim", 0) == 2 else 1
        size = block_size or -(-lengths[0] // rows)
        if size % 128:
            raise TPUKernelError(
                f"a mask of {rows} rows cuts {lengths[0]} queries into blocks of {size} tokens; "
                "they must be multiples of 128: give block_size=, or a BlockMask."
            )
        mask = BlockMask.from_array(mask, block_size=size)
    expected = tuple(-(-length // mask.block_size) for length in lengths)
    if mask.to_array().shape != expected:
        raise TPUKernelError(
            f"a mask of {mask.to_array().shape} blocks of {mask.block_size} tokens does not cover "
            f"{lengths[0]} queries and {lengths[1]} keys; expected {expected} blocks."
        )
    return mask


def _segment_ids(segment_ids: Any, q: Any, k: Any) -> SegmentIds | None:
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
