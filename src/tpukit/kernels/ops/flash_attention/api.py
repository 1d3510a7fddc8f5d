"""`flash_attention`: attention that never holds the score matrix, on TPU, GPU and CPU."""

from typing import Any

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError
from ...registry.op import PALLAS_TPU, REFERENCE, find_implementation
from ..rope.tables import RopeTables
from .arguments import (
    AxisOrder,
    check_arrays,
    check_chunk,
    check_rope,
    check_sinks,
    check_sizes,
    equal_blocks,
    read_segment_ids,
)
from .chunks import attend_in_chunks
from .cudnn_gpu import cudnn_attention, cudnn_is_here, why_not_cudnn
from .differentiation import OP_NAME, XLA, attend_with_gradient
from .masks import Mask, read_mask
from .problem import FlashBlocks, SegmentIds
from .reference import rotate_heads

CUDNN = "cudnn"
NAMES: tuple[str, ...] = (PALLAS_TPU, CUDNN, XLA, REFERENCE)


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: int | None = None,
    chunk: int | None = None,
    mask: Mask | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    rope: tuple[jax.Array, jax.Array] | None = None,
    layout: AxisOrder = "BSHD",
    use_flash: bool = True,
    implementation: str | None = None,
    blocks: FlashBlocks | None = None,
    block_size: int | None = None,
) -> jax.Array:
    """Attention of q (B, S, H, D) over k (B, S, KV, D) and v (B, S, KV, Dv) -> (B, S, H, Dv).

    Without a word about masks every query attends to every key, as in
    `jax.nn.dot_product_attention` and torch's `scaled_dot_product_attention`. Positions of
    queries and keys both count from 0, also where the lengths differ. A key must be allowed by
    everything that is given: causal, window, mask and segment ids. The result of a query that may
    attend to no key is zero, and so are its gradients.

    Args:
        q: Queries, in float32 or bfloat16 for the TPU kernel.
        k: Keys; H must be a multiple of KV.
        v: Values.
        causal: Whether query i attends to keys j <= i only.
        window: Query i attends to keys j with |i - j| < window only: with `causal` to itself and
            the window - 1 keys before it, without to as many behind it as well. In jax and
            flash-attn that is a window of (window - 1, 0) or (window - 1, window - 1).
        chunk: Query i attends to key j only if i // chunk == j // chunk, in causal attention.
        mask: Booleans, True where a query may attend to a key, that broadcast to (B, H, queries,
            keys) in either layout, traced or not; nothing is broadcast in memory. Or a pattern of
            blocks, whose blocks that are False are not computed: a `BlockMask`, or a numpy array
            with one boolean for each block of `block_size` tokens, or of a number of them that
            divides the lengths.
        segment_ids: (B, S) numbers that keep packed documents apart, or a pair of them for
            queries and keys.
        soft_cap: Scores are bent by a tanh to stay within ± this.
        scale: Of the scores; `D ** -0.5` by default.
        sinks: (H,) learned scores that join the sum of a row's weights, and nothing else.
        rope: Cosines and sines of the positions, (S, D / 2) or (B, S, D / 2): queries and keys
            are rotated inside the kernel. They have no gradient.
        layout: "BSHD" as above, or "BHSD" for q (B, H, S, D), k and v (B, KV, S, D or Dv) and a
            result (B, H, S, Dv). The kernels read the former; the latter is transposed.
        use_flash: False computes the whole score matrix in plain jnp.
        implementation: "pallas_tpu", "cudnn", "xla" or "reference"; None takes the kernel on
            TPU, cuDNN on GPU where it can (it takes no mask), and rows of the score matrix in
            turn elsewhere.
        blocks: Of the TPU kernel; None takes the tuned ones.
        block_size: Short for equal blocks of that many tokens.

    Raises:
        TPUKernelError: The shapes do not fit each other, or the implementation asked for cannot.
    """
    if implementation is not None:
        find_implementation(OP_NAME, dict.fromkeys(NAMES), implementation)
    check_arrays(q, k, v, layout=layout)
    check_sizes(window, soft_cap, block_size)
    if layout == "BHSD":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    if rope is not None:
        check_rope(rope, q, k)
    check_sinks(sinks, q.shape[2])
    check_chunk(chunk, q, k, causal=causal, masked=mask is not None)
    masks = read_mask(mask, q, k, block_size=block_size)
    ids = read_segment_ids(segment_ids, q, k)
    if block_size is not None and blocks is None:
        blocks = equal_blocks(block_size)
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
        "mask": masks.blocks,
        "soft_cap": soft_cap,
        "scale": scale,
    }
    tables = None if rope is None else RopeTables(*rope)
    if chunk is not None and tables is not None:
        # Positions in a chunk are not those in the sequence.
        q, k = (rotate_heads(x, tables) for x in (q, k))
        tables = None

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *ids: Any) -> jax.Array:
        pair = None if ids[0] is None else SegmentIds(*ids)
        arrays = (q, k, v, pair, tables, masks.scores, sinks)
        return _choose(*arrays, implementation=implementation, blocks=blocks, options=options)

    ids = (None, None) if ids is None else ids
    out = attend_in_chunks(attend, q, k, v, *ids, chunk=chunk)
    if masks.queries is not None:
        out = jnp.where(masks.queries, out, 0)
    return out.swapaxes(1, 2) if layout == "BHSD" else out


def _choose(
    *arrays: Any, implementation: str | None, blocks: FlashBlocks | None, options: dict[str, Any]
) -> jax.Array:
    """The implementation of that name, or of the platform."""
    q, _, v, ids, _, dense_mask, sinks = arrays
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
        q,
        v,
        causal=options["causal"],
        window=options["window"],
        masked=any(x is not None for x in (ids, dense_mask, options["mask"])),
        soft_cap=options["soft_cap"],
        sinks=sinks,
    )
    if implementation is not None or without is not None or not cudnn_is_here():
        return elsewhere(*arrays)

    def on_gpu(*arrays: Any) -> Any:
        return cudnn_attention(*arrays, **options)

    # Outside of the shared gradient, because cuDNN's own keeps residuals of its own.
    return jax.lax.platform_dependent(*arrays, cuda=on_gpu, default=elsewhere)
