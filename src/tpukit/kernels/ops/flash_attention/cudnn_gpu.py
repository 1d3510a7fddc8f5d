"""Flash attention on NVIDIA GPUs by cuDNN, for calls without a mask in memory."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError
from .problem import AttentionArrays
from .reference import rotate_heads
from .visibility import BlockMask

WIDEST_HEAD = 256


def why_not_cudnn(
    q: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    window: int | None,
    masked: bool,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> str | None:
    """Return why cuDNN cannot run this call, or not fast; None if it can.

    `masked` is whether there is a mask of any kind, or segment ids.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN computes in 16 bits and the queries are {q.dtype.name}"
    if q.shape[3] % 8 or q.shape[3] > WIDEST_HEAD:
        return f"cuDNN takes heads of multiples of 8 up to {WIDEST_HEAD}, not {q.shape[3]}"
    if v.shape[3] > q.shape[3]:
        return f"cuDNN takes values no wider than keys, not {v.shape[3]} beside {q.shape[3]}"
    if masked:
        return "a mask or segment ids would make cuDNN read 16 bits for every score"
    if soft_cap is not None:
        return "cuDNN has no soft cap"
    if sinks is not None:
        return "cuDNN has no sinks"
    if window is not None and not causal:
        return "cuDNN has windows only for causal attention"
    return None


def cudnn_is_here() -> bool:
    """Whether this jax has cuDNN, which tracing its attention needs even for another platform."""
    return any(
        importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None for version in (12, 13)
    ) and any(device.platform == "gpu" for device in jax.devices())


def cudnn_attention(
    *arrays: Any,
    causal: bool = False,
    window: int | None = None,
    mask: BlockMask | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Compute attention by `jax.nn.dot_product_attention`, with cuDNN's own gradient.

    Raises:
        TPUKernelError: cuDNN is not installed, or cannot run this call.
    """
    q, k, v, segment_ids, rope, dense_mask, sinks = AttentionArrays(*arrays)
    masked = any(x is not None for x in (segment_ids, dense_mask, mask))
    reason = why_not_cudnn(
        q, v, causal=causal, window=window, masked=masked, soft_cap=soft_cap, sinks=sinks
    )
    if reason is None and not cudnn_is_here():
        reason = "this machine has no NVIDIA GPU with jax's CUDA plugin"
    if reason is not None:
        raise TPUKernelError(
            f"flash_attention cannot run as 'cudnn' here: {reason}; use implementation='xla', or "
            "None to let it choose."
        )
    if rope is not None:
        q, k = (rotate_heads(x, rope) for x in (q, k))
    # Keys and values need one width there; the zero columns are cut off again.
    width = v.shape[3]
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[3] - width)))
    call: Any = jax.nn.dot_product_attention
    out = call(
        q,
        k,
        v,
        scale=scale,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return out[..., :width]
