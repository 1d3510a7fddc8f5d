"""`flash_attention`: attention that never stores the score matrix, on TPU, GPU and CPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ....annotations import PyTree
from ....errors import TPUKernelError
from ...partition.splits import Splits
from ...registry.dispatch import Passes, dispatch_with_gradient, recomputed
from ...registry.op import PALLAS_TPU, REFERENCE, XLA, KernelCase, Op, find_implementation
from ..rope import RopeTables
from . import pallas_tpu, reference, xla
from .arguments import (
    AxisOrder,
    Mask,
    check_arrays,
    check_chunk,
    check_rope,
    check_sinks,
    check_sizes,
    equal_blocks,
    read_mask,
    read_segment_ids,
)
from .blocks import block_space, bucket, default_blocks, vmem_bytes
from .cudnn_gpu import cudnn_attention, cudnn_is_here, why_not_cudnn
from .problem import AttentionArrays, FlashBlocks, Residuals
from .reference import rotate_heads
from .spec import AttentionSpec

OP_NAME = "flash_attention"
PASSES = {
    PALLAS_TPU: Passes(pallas_tpu.forward, pallas_tpu.backward, pallas_tpu.result),
    XLA: Passes(xla.forward, xla.backward),
    REFERENCE: recomputed(reference.attention),
}
_ARGUMENTS = (
    *("b q h d", "b k h d", "b k h v"),
    *(("b q", "b k"), ("b p half", "b p half"), "b h q k", "h"),
)
SPLITS = Splits(
    free="b h",
    arguments=_ARGUMENTS,
    shared="h",
    result="b q h v",
    residuals=(*_ARGUMENTS, "b q h v", "b h q"),
)


def attend_with_gradient(*arrays: PyTree, **choice: Any) -> jax.Array:
    """Call `dispatch` with a gradient, which costs nothing in calls without one.

    Args:
        *arrays: The fields of `AttentionArrays`.
        **choice: The keyword arguments of `dispatch`.
    """
    # The reference keeps only its arguments.
    keep = None if choice.get("implementation") == REFERENCE else _name_for_remat
    return dispatch_with_gradient(OP_NAME, PASSES, *arrays, splits=SPLITS, keep=keep, **choice)


def implementation(name: str) -> Callable[..., jax.Array]:
    """Return one implementation as a function `f(*arrays, **options)` with its gradient."""
    find_implementation(OP_NAME, PASSES, name)

    def call(*arrays: PyTree, **options: Any) -> jax.Array:
        return attend_with_gradient(*arrays, implementation=name, options=options)

    return call


def _name_for_remat(out: jax.Array, residuals: Residuals) -> tuple[jax.Array, Residuals]:
    """Return the result and its log-sum-exp under the name by which a remat policy keeps them."""
    out, lse = (checkpoint_name(x, pallas_tpu.KEPT_NAME) for x in (out, residuals.lse))
    return out, residuals._replace(out=out, lse=lse)


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
    """Return attention of q (B, S, H, D) over k (B, S, KV, D) and v (B, S, KV, Dv): (B, S, H, Dv).

    Without masks every query attends to every key, as in `jax.nn.dot_product_attention` and torch's
    `scaled_dot_product_attention`. Positions of queries and keys both count from 0, also where the
    lengths differ. A query attends to a key only if all of causal, window, mask and segment ids
    allow it. The result of a query that attends to no key is zero, and so are its gradients.

    Args:
        q: Queries, in float32 or bfloat16 for the TPU kernel.
        k: Keys; H must be a multiple of KV.
        v: Values.
        causal: Whether query i attends only to keys j <= i.
        window: Query i attends only to keys j with |i - j| < window: with `causal` to itself and
            the window - 1 keys before it, else also to as many after it. In jax and flash-attn that
            is a window of (window - 1, 0) or (window - 1, window - 1).
        chunk: Query i attends to key j only if i // chunk == j // chunk, in causal attention.
        mask: Booleans, True where a query may attend to a key, that broadcast to (B, H, queries,
            keys) in either layout, traced or not; nothing is broadcast in memory. Or a pattern of
            blocks, of which False ones are not computed: a `BlockMask`, or a numpy array with one
            boolean per block of `block_size` tokens, or per block of a size that divides the
            lengths.
        segment_ids: (B, S) document numbers of packed sequences, or a pair of them for queries and
            keys; a query attends only to keys of its document.
        soft_cap: Squeeze scores into ±soft_cap by a tanh.
        scale: Factor of the scores; `D ** -0.5` by default.
        sinks: (H,) learned scores that only join the softmax's sum.
        rope: Cosines and sines of the positions, (S, D / 2) or (B, S, D / 2). The kernel rotates
            queries and keys by them. They have no gradient.
        layout: "BSHD" as above, or "BHSD" for q (B, H, S, D), k and v (B, KV, S, D or Dv) and a
            result (B, H, S, Dv). The kernels read the former; the latter is transposed.
        use_flash: False computes the full score matrix in plain jnp.
        implementation: "pallas_tpu", "cudnn", "xla" or "reference". None takes the kernel on TPU,
            cuDNN on GPU where it can (it takes no mask), and blocks of rows of the score matrix
            elsewhere.
        blocks: Block sizes of the TPU kernel; None takes the tuned ones.
        block_size: Shorthand for equal blocks of that many tokens.

    Raises:
        TPUKernelError: The shapes do not match, or the named implementation cannot take them.
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
    masks = read_mask(mask, q, k, block_size=block_size)
    spec = AttentionSpec(
        causal=causal,
        window=window,
        chunk=chunk,
        mask=masks.blocks,
        soft_cap=soft_cap,
        scale=scale,
        segment_ids=read_segment_ids(segment_ids, q, k),
        sinks=sinks,
    )
    check_chunk(spec, q, k, masked=mask is not None)
    if block_size is not None and blocks is None:
        blocks = equal_blocks(block_size)
    if not use_flash:
        if implementation not in (None, REFERENCE):
            raise TPUKernelError(
                f"use_flash=False computes the full score matrix, but implementation="
                f"'{implementation}' does not; give only one of them."
            )
        implementation = REFERENCE
    tables = None if rope is None else RopeTables(*rope)
    if chunk is not None and tables is not None:
        # Positions within a chunk are not those in the sequence.
        q, k = (rotate_heads(x, tables) for x in (q, k))
        tables = None

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec) -> jax.Array:
        arrays = AttentionArrays(q, k, v, spec.segment_ids, tables, masks.scores, spec.sinks)
        return _choose(arrays, spec, implementation=implementation, blocks=blocks)

    out = spec.by_chunk(attend, q, k, v)
    if masks.queries is not None:
        out = jnp.where(masks.queries, out, 0)
    return out.swapaxes(1, 2) if layout == "BHSD" else out


def _choose(
    arrays: AttentionArrays,
    spec: AttentionSpec,
    *,
    implementation: str | None,
    blocks: FlashBlocks | None,
) -> jax.Array:
    """Run the implementation of that name, or that of the platform."""
    q, options = arrays.q, spec.options
    if implementation == CUDNN:
        return cudnn_attention(*arrays, **options)
    kernel_can = q.dtype in (jnp.float32, jnp.bfloat16)
    if implementation == PALLAS_TPU and not kernel_can:
        raise TPUKernelError(
            f"the TPU kernel takes float32 or bfloat16, but the queries are {q.dtype.name}; "
            "cast them, or use implementation='xla'."
        )

    def elsewhere(*arrays: PyTree) -> Any:
        return attend_with_gradient(
            *arrays,
            implementation=implementation,
            on_tpu=PALLAS_TPU if kernel_can else XLA,
            on_gpu=XLA,
            elsewhere=XLA,
            options=options,
            pallas_options={"blocks": blocks},
        )

    without = why_not_cudnn(q, arrays.v, spec, masked=arrays.dense_mask is not None)
    if implementation is not None or without is not None or not cudnn_is_here():
        return elsewhere(*arrays)

    def on_gpu(*arrays: PyTree) -> Any:
        return cudnn_attention(*arrays, **options)

    # Outside of the shared gradient, because cuDNN has residuals of its own.
    return jax.lax.platform_dependent(*arrays, cuda=on_gpu, default=elsewhere)


def case(
    tokens: int,
    *,
    heads: int = 8,
    kv_heads: int = 8,
    width: int = 128,
    dtype: str = "bfloat16",
    batch: int = 1,
    causal: bool = True,
    window: int | None = None,
) -> KernelCase:
    """Return a case of self-attention over `tokens`, causal by default, as in a decoder."""
    options: dict[str, Any] = {"causal": causal}
    kind = "causal" if causal else "full"
    if window is not None:
        options["window"] = window
        kind = f"window{window}" if causal else f"full_window{window}"
    grouped = "" if heads == kv_heads else f"_gqa{heads}_{kv_heads}"
    q, k = (
        jax.ShapeDtypeStruct((batch, tokens, n, width), jnp.dtype(dtype)) for n in (heads, kv_heads)
    )
    return KernelCase(f"{kind}_{tokens}x{width}{grouped}_{dtype}", (q, k, k), options)


OP = Op(
    name=OP_NAME,
    function=flash_attention,
    implementations={
        PALLAS_TPU: implementation(PALLAS_TPU),
        XLA: implementation(XLA),
        CUDNN: cudnn_attention,
        REFERENCE: reference.attention,
    },
    cases=(
        case(512, heads=2, kv_heads=2),
        case(300, heads=2, kv_heads=1, width=64, dtype="float32", causal=False),
        case(4096),
        case(8192),
        case(4096, heads=32, kv_heads=8),
        case(4096, window=1024),
        case(2048),
        case(4096, width=256),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    on_gpu=CUDNN,
    differentiable=(0, 1, 2),
    bucket=bucket,
    splits=SPLITS,
)
