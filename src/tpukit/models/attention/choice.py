"""Implementations of causal attention behind one signature, and their choice by name."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Unpack

import jax

from ...annotations import AnyMesh
from ...errors import TPUModelError, did_you_mean
from ...hardware.target import current_target
from ...kernels.ops.flash_attention.api import implementation as flash_as
from ...kernels.ops.flash_attention.cudnn_gpu import attend_by_jax, why_not_cudnn
from ...kernels.ops.flash_attention.pallas_tpu import can_flash
from ...kernels.ops.flash_attention.spec import AttentionOptions, AttentionSpec, causal_spec
from ...kernels.registry.op import XLA
from ...parallel.ring.attention import ring_attention
from .tpu_kernels import flash_attention, splash_attention, splash_attention_in_two

# Above this length the score matrix is larger than every other activation of a layer.
LONGEST_UNBLOCKED = 2048


class AttentionFunction(Protocol):
    """Causal attention of q (B, S, H, Dk) over k (B, S, KV, Dk) and v (B, S, KV, Dv).

    A function raises TPUModelError for options that it does not support. Options with their
    defaults are not passed, so a function needs only those that its models use.
    """

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Unpack[AttentionOptions]
    ) -> jax.Array:
        """Return the attention output (B, S, H, Dv); H must be a multiple of KV."""
        ...


def dot_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, **options: Unpack[AttentionOptions]
) -> jax.Array:
    """Return attention with the full score matrix, through `jax.nn.dot_product_attention`.

    That function has no soft caps, sinks or values of another width. With these, scores are
    computed row by row and recomputed for the gradient.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec) -> jax.Array:
        if spec.soft_cap is None and spec.sinks is None and v.shape[-1] == q.shape[-1]:
            return attend_by_jax(q, k, v, spec, implementation="xla")
        return flash_as(XLA)(q, k, v, spec.segment_ids, None, None, spec.sinks, **spec.options)

    return causal_spec(**options).by_chunk(attend, q, k, v)


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, **options: Unpack[AttentionOptions]
) -> jax.Array:
    """Return attention by cuDNN's kernel, on an NVIDIA GPU.

    Raises:
        TPUModelError: cuDNN does not support the options.
    """
    spec = causal_spec(**options)
    # Slow with segment ids, but right where it was asked for by name.
    reason = why_not_cudnn(q, v, replace(spec, segment_ids=None), masked=False)
    if reason is not None:
        raise TPUModelError(f"{reason}; use attention='auto', which falls back to XLA, or 'xla'.")
    return spec.by_chunk(partial(attend_by_jax, implementation="cudnn"), q, k, v)


def automatic_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mesh: AnyMesh | None = None,
    batch_axes: tuple[str, ...] = (),
    head_axes: tuple[str, ...] = (),
    **options: Unpack[AttentionOptions],
) -> jax.Array:
    """Return attention by our flash kernel on TPU, by cuDNN on GPU, by XLA elsewhere.

    The platform is the one the program is lowered for, so a program that is compiled on a laptop
    for a TPU contains the kernel. XLA computes all scores at once, or blocks of long sequences.
    `mesh`, `batch_axes` and `head_axes` are those of `flash_attention`; without a mesh the
    sharding is unknown and the TPU kernel is not used.
    """
    on_gpu = current_target() is None and jax.default_backend() == "gpu"
    if on_gpu and why_not_cudnn(q, v, causal_spec(**options), masked=False) is None:
        return cudnn_attention(q, k, v, **options)
    length = min(q.shape[1], options.get("chunk") or q.shape[1])
    in_xla = dot_attention if length <= LONGEST_UNBLOCKED else ring_attention
    sinks = options.get("sinks")  # an argument below, because it has a gradient
    rest: dict[str, Any] = {name: value for name, value in options.items() if name != "sinks"}

    def plain(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        return in_xla(q, k, v, sinks=sinks, **rest)

    if mesh is None or not can_flash(q, v, length=length):
        return plain(q, k, v, sinks)

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        spread: dict[str, Any] = {"mesh": mesh, "batch_axes": batch_axes, "head_axes": head_axes}
        return flash_attention(q, k, v, sinks=sinks, **rest, **spread)

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
