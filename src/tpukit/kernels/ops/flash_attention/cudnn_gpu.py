"""Flash attention on NVIDIA GPUs by cuDNN, for calls without a mask in memory."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from ....annotations import PyTree
from ....errors import TPUKernelError
from .problem import AttentionArrays
from .reference import rotate_heads
from .spec import AttentionSpec

WIDEST_HEAD = 256


def why_not_cudnn(q: jax.Array, v: jax.Array, spec: AttentionSpec, *, masked: bool) -> str | None:
    """Return why cuDNN cannot run this call, or not fast; None if it can.

    `masked` is whether there is a mask in memory, beside what the spec has.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN computes in 16 bits and the queries are {q.dtype.name}"
    if q.shape[3] % 8 or q.shape[3] > WIDEST_HEAD:
        return f"cuDNN takes heads of multiples of 8 up to {WIDEST_HEAD}, not {q.shape[3]}"
    if v.shape[3] > q.shape[3]:
        return f"cuDNN takes values no wider than keys, not {v.shape[3]} beside {q.shape[3]}"
    if masked or spec.mask is not None or spec.segment_ids is not None:
        return "a mask or segment ids would make cuDNN read 16 bits for every score"
    if spec.soft_cap is not None:
        return "cuDNN has no soft cap"
    if spec.sinks is not None:
        return "cuDNN has no sinks"
    if spec.window is not None and not spec.causal:
        return "cuDNN has windows only for causal attention"
    return None


def cudnn_is_here() -> bool:
    """Whether this jax has cuDNN, which tracing its attention needs even for another platform."""
    return any(
        importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None for version in (12, 13)
    ) and any(device.platform == "gpu" for device in jax.devices())


def cudnn_attention(*arrays: PyTree, **options: Any) -> jax.Array:
    """Compute attention by `jax.nn.dot_product_attention`, with cuDNN's own gradient.

    Args:
        *arrays: The fields of `AttentionArrays`.
        **options: The static fields of `AttentionSpec`.

    Raises:
        TPUKernelError: cuDNN is not installed, or cannot run this call.
    """
    q, k, v, segment_ids, rope, dense_mask, sinks = AttentionArrays(*arrays)
    spec = AttentionSpec(**options, segment_ids=segment_ids, sinks=sinks)
    reason = why_not_cudnn(q, v, spec, masked=dense_mask is not None)
    if reason is None and not cudnn_is_here():
        reason = "this machine has no NVIDIA GPU with jax's CUDA plugin"
    if reason is not None:
        raise TPUKernelError(
            f"flash_attention cannot run as 'cudnn' here: {reason}; use implementation='xla', or "
            "None to let it choose."
        )
    if rope is not None:
        q, k = (rotate_heads(x, rope) for x in (q, k))
    return attend_by_jax(q, k, v, spec, implementation="cudnn")


def attend_by_jax(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, *, implementation: str
) -> jax.Array:
    """Return attention without sinks and caps through `jax.nn.dot_product_attention`.

    Args:
        q: Queries.
        k: Keys.
        v: Values, no wider than keys.
        spec: The attention.
        implementation: "xla" or "cudnn".
    """
    mask = None
    if spec.segment_ids is not None:
        mask = (spec.segment_ids.q[:, :, None] == spec.segment_ids.kv[:, None, :])[:, None]
    # Keys and values need one width there; the zero columns are cut off again.
    width = v.shape[3]
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[3] - width)))
    call: Any = jax.nn.dot_product_attention
    out = call(
        q,
        k,
        v,
        mask=mask,
        scale=spec.scale,
        is_causal=spec.causal,
        local_window_size=None if spec.window is None else (spec.window - 1, 0),
        implementation=implementation,
    )
    return out[..., :width]
