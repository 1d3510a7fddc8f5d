"""Implementations of causal attention behind one signature, and their choice by name."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ...annotations import AnyMesh
from ...errors import TPUModelError, did_you_mean
from ...hardware.target import current_target
from ...kernels.ops.flash_attention.api import implementation as flash_as
from ...kernels.ops.flash_attention.cudnn_gpu import why_not_cudnn
from ...kernels.ops.flash_attention.pallas_tpu import can_flash
from ...kernels.ops.flash_attention.problem import SegmentIds
from ...kernels.ops.flash_attention.reference import attend_in_chunks
from ...kernels.registry.op import XLA
from ...parallel.ring.attention import ring_attention
from .tpu_kernels import flash_attention, splash_attention, splash_attention_in_two

# Above this length the score matrix is larger than every other activation of a layer.
LONGEST_UNBLOCKED = 2048


class AttentionFunction(Protocol):
    """Causal attention of q (B, S, H, Dk) over k (B, S, KV, Dk) and v (B, S, KV, Dv).

    A function raises TPUModelError for options that it does not support.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None = None,
        chunk: int | None = None,
        segment_ids: jax.Array | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Return the attention output (B, S, H, Dv).

        Args:
            q: Queries.
            k: Keys; H must be a multiple of KV.
            v: Values.
            window: How many keys back a query attends to, itself included (None: all).
            chunk: Query i attends to key j only if i // chunk == j // chunk.
            segment_ids: (B, S) document numbers; tokens attend within their document only.
            scale: Scale of the scores; `Dk ** -0.5` by default.
            soft_cap: Scores are limited to ± this by a tanh.
            sinks: (H,) learned scores that are added to the softmax's denominator only.
        """
        ...


def dot_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    chunk: int | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Return attention with the full score matrix, through `jax.nn.dot_product_attention`.

    That function has no soft caps, sinks or values of another width. With these, scores are
    computed row by row and recomputed for the gradient.
    """
    supported = soft_cap is None and sinks is None and v.shape[-1] == q.shape[-1]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
        if supported:
            return _attend_by_jax(q, k, v, ids, window=window, scale=scale, implementation="xla")
        pair = None if ids is None else SegmentIds(ids, ids)
        options = {"causal": True, "window": window, "scale": scale, "soft_cap": soft_cap}
        return flash_as(XLA)(q, k, v, pair, None, None, sinks, **options)

    return attend_in_chunks(attend, q, k, v, segment_ids, chunk=chunk)


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    chunk: int | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Return attention by cuDNN's kernel, on an NVIDIA GPU.

    Raises:
        TPUModelError: cuDNN does not support the options.
    """
    reason = why_not_cudnn(
        q, v, causal=True, window=window, masked=False, soft_cap=soft_cap, sinks=sinks
    )
    if reason is not None:
        raise TPUModelError(f"{reason}; use attention='auto', which falls back to XLA, or 'xla'.")

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
        # cuDNN needs values as wide as keys, so they are padded and the output is cut.
        width = v.shape[-1]
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] - width)))
        out = _attend_by_jax(q, k, v, ids, window=window, scale=scale, implementation="cudnn")
        return out[..., :width]

    return attend_in_chunks(attend, q, k, v, segment_ids, chunk=chunk)


def _attend_by_jax(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    *,
    window: int | None,
    scale: float | None,
    implementation: str,
) -> jax.Array:
    mask = None
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    call: Any = jax.nn.dot_product_attention
    return call(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def automatic_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    chunk: int | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    mesh: AnyMesh | None = None,
    batch_axes: tuple[str, ...] = (),
    head_axes: tuple[str, ...] = (),
) -> jax.Array:
    """Return attention by our flash kernel on TPU, by cuDNN on GPU, by XLA elsewhere.

    The platform is the one the program is lowered for, so a program that is compiled on a laptop
    for a TPU contains the kernel. XLA computes all scores at once, or blocks of long sequences.
    `mesh`, `batch_axes` and `head_axes` are those of `flash_attention`; without a mesh the
    sharding is unknown and the TPU kernel is not used.
    """
    options: dict[str, Any] = {"window": window, "chunk": chunk, "scale": scale}
    on_gpu = current_target() is None and jax.default_backend() == "gpu"
    masked = segment_ids is not None
    without = why_not_cudnn(
        q, v, causal=True, window=window, masked=masked, soft_cap=soft_cap, sinks=sinks
    )
    if on_gpu and without is None:
        return cudnn_attention(q, k, v, **options)
    options |= {"segment_ids": segment_ids, "soft_cap": soft_cap}
    length = min(q.shape[1], chunk or q.shape[1])
    in_xla = dot_attention if length <= LONGEST_UNBLOCKED else ring_attention

    def plain(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        return in_xla(q, k, v, sinks=sinks, **options)

    if mesh is None or not can_flash(q, v, length=length):
        return plain(q, k, v, sinks)

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        spread: dict[str, Any] = {"mesh": mesh, "batch_axes": batch_axes, "head_axes": head_axes}
        return flash_attention(q, k, v, sinks=sinks, **options, **spread)

    choose: Any = jax.lax.platform_dependent
    return choose(q, k, v, sinks, tpu=kernel, default=plain)


# Without a mesh, "ring", "flash" and "splash" run on one device; a workload adds its mesh.
_BY_NAME: dict[str, Callable[..., jax.Array]] = {
    "auto": automatic_attention,
    "xla": dot_attention,
    "ring": ring_attention,
    "flash": flash_attention,
    "splash": splash_attention,
    "splash in two": splash_attention_in_two,
    "cudnn": cudnn_attention,
}


def get_attention(attention: str | AttentionFunction) -> AttentionFunction:
    """Return the attention function of that name, or the function itself.

    Raises:
        TPUModelError: The name is unknown.
    """
    if not isinstance(attention, str):
        return attention
    if attention not in _BY_NAME:
        raise TPUModelError(
            f"attention '{attention}' is unknown; use one of {', '.join(_BY_NAME)}, or pass a "
            f"function.{did_you_mean(attention, _BY_NAME)}"
        )
    return _BY_NAME[attention]
