"""Ways to compute causal attention, behind one call so that a model can be given any of them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax

from ...annotations import AnyMesh
from ...errors import TPUModelError, did_you_mean
from ...hardware.target import current_target
from ...kernels.ops.flash_attention.pallas_tpu import can_flash
from ...parallel.ring.attention import ring_attention
from .tpu_kernels import flash_attention, splash_attention, splash_attention_in_two

# Above this length the full score matrix outweighs every other activation of a layer.
LONGEST_UNBLOCKED = 2048


class AttentionFunction(Protocol):
    """Causal attention of q (B, S, H, D) over k, v (B, S, KV, D) -> (B, S, H, D).

    `window` is how many keys back a query sees, itself included (None: all); `segment_ids`
    (B, S) keeps packed documents apart. The scale is `head_dim ** -0.5`.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Attend."""
        ...


def dot_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """The whole score matrix at once, through `jax.nn.dot_product_attention`."""
    mask = None
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    call: Any = jax.nn.dot_product_attention
    return call(
        q,
        k,
        v,
        mask=mask,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def can_cudnn(q: jax.Array, segment_ids: jax.Array | None) -> bool:
    """Whether cuDNN's kernel takes the queries; with a mask it would be slower than XLA."""
    return segment_ids is None and q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0


def automatic_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    mesh: AnyMesh | None = None,
    batch_axes: tuple[str, ...] = (),
    head_axes: tuple[str, ...] = (),
) -> jax.Array:
    """Choose our flash kernel on TPU, cuDNN's on GPU, elsewhere all scores, or blocks of many.

    The platform is the one the program is lowered for, so a program made on a laptop for a TPU
    holds the kernel. `mesh`, `batch_axes` and `head_axes` are those of `flash_attention`;
    without a mesh nobody knows how the arrays are spread, so there is no kernel.
    """
    options: dict[str, Any] = {"window": window, "segment_ids": segment_ids}
    plain = partial(dot_attention if q.shape[1] <= LONGEST_UNBLOCKED else ring_attention, **options)
    if current_target() is None and jax.default_backend() == "gpu" and can_cudnn(q, segment_ids):
        return dot_attention(q, k, v, implementation="cudnn", **options)
    if mesh is None or not can_flash(q):
        return plain(q, k, v)
    kernel = partial(
        flash_attention, mesh=mesh, batch_axes=batch_axes, head_axes=head_axes, **options
    )
    choose: Any = jax.lax.platform_dependent
    return choose(q, k, v, tpu=kernel, default=plain)


# "ring", "flash" and "splash" without a mesh work on one device; a workload gives them its mesh.
_BY_NAME: dict[str, Callable[..., jax.Array]] = {
    "auto": automatic_attention,
    "xla": dot_attention,
    "ring": ring_attention,
    "flash": flash_attention,
    "splash": splash_attention,
    "splash in two": splash_attention_in_two,
    "cudnn": partial(dot_attention, implementation="cudnn"),
}


def get_attention(attention: str | AttentionFunction) -> AttentionFunction:
    """The attention called by that name, or the function itself."""
    if not isinstance(attention, str):
        return attention
    if attention not in _BY_NAME:
        raise TPUModelError(
            f"attention '{attention}' is not known; use one of {', '.join(_BY_NAME)}, or pass a "
            f"function.{did_you_mean(attention, _BY_NAME)}"
        )
    return _BY_NAME[attention]
