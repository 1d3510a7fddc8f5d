"""Attention on TPU by a kernel per device: tpukit's flash kernel or jax's splash kernel.

On a mesh each kernel computes the examples and heads of its device. Blocks of scores stay in VMEM.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, Unpack

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec

from ...annotations import AnyMesh
from ...errors import TPUModelError
from ...kernels.ops.flash_attention.api import implementation
from ...kernels.ops.flash_attention.pallas_tpu import KEPT_NAME, NARROWEST, SHORTEST, can_flash
from ...kernels.ops.flash_attention.spec import AttentionOptions, AttentionSpec, causal_spec
from ...kernels.partition.sharded_call import sharded_call
from ...kernels.registry.op import PALLAS_TPU
from ...parallel.mesh.manual_axes import whole_key_heads

# Block sizes of the published Trillium recipes; shorter sequences use a common divisor.
LARGEST_BLOCK = 2048
SMALLEST_BLOCK = 128
HALF_LANES = 64  # heads of 64 compile and run; smaller ones were not tried


class LocalAttention(Protocol):
    """An attention kernel for the arrays of one device."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, *, interpret: bool
    ) -> jax.Array:
        """Return attention of q (B, S, H, Dk) over k (B, S, KV, Dk), v (B, S, KV, Dv)."""
        ...


@dataclass(frozen=True)
class KernelAttention:
    """A kernel as an `AttentionFunction` with arguments for the sharding of its arrays.

    Attributes:
        attend: The kernel.
        check: Raises TPUModelError where the kernel does not support these queries, values and
            tokens per sequence.
    """

    attend: LocalAttention
    check: Callable[[jax.Array, jax.Array, int], None]

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        mesh: AnyMesh | None = None,
        batch_axes: tuple[str, ...] = (),
        head_axes: tuple[str, ...] = (),
        interpret: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> jax.Array:
        """Return causal attention of q (B, S, H, Dk) over k (B, S, KV, Dk) and v (B, S, KV, Dv).

        Args:
            q: Queries.
            k: Keys; H must be a multiple of KV.
            v: Values.
            mesh: The mesh of the arrays; None for one device.
            batch_axes: Mesh axes that shard the batch.
            head_axes: Mesh axes that shard the heads.
            interpret: Interpret the kernel without a TPU, slowly.
            **options: See `AttentionOptions`.

        Raises:
            TPUModelError: The kernel does not support the shapes.
        """
        spec = causal_spec(**options)
        self.check(q, v, min(q.shape[1], spec.chunk or q.shape[1]))
        if mesh is not None:
            k, v = whole_key_heads(q, k, v, mesh=mesh, axes=head_axes)
        attend = partial(self.attend, interpret=interpret)

        def local(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec) -> jax.Array:
            return spec.by_chunk(attend, q, k, v)

        if mesh is None or not (batch_axes or head_axes):
            return local(q, k, v, spec)
        spread = PartitionSpec(batch_axes or None, None, head_axes or None, None)
        rows, heads = PartitionSpec(batch_axes or None, None), PartitionSpec(head_axes or None)
        in_specs = (spread, spread, spread, spec.with_arrays(rows, heads))
        call = sharded_call(local, mesh, in_specs=in_specs, out_specs=spread)
        return call(q, k, v, spec)


def _check_flash(q: jax.Array, v: jax.Array, length: int) -> None:
    if not can_flash(q, v, length=length):
        raise TPUModelError(
            f"flash attention needs float32 or bfloat16, {SHORTEST} tokens or more (per chunk) and "
            f"heads of {NARROWEST} or more, but queries are {q.dtype.name} {q.shape} and values "
            f"{v.shape}; change the shapes, or use attention='xla'."
        )


def _flash(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, *, interpret: bool
) -> jax.Array:
    ids = jax.tree.map(lambda x: x.astype(jnp.int32), spec.segment_ids)
    kernel = implementation(PALLAS_TPU)
    return kernel(q, k, v, ids, None, None, spec.sinks, interpret=interpret, **spec.options)


flash_attention = KernelAttention(_flash, _check_flash)


def can_splash(q: jax.Array, v: jax.Array, length: int) -> bool:
    """Whether the kernel's blocks fit sequences of this length and heads of these widths."""
    widths = (q.shape[-1], v.shape[-1])
    return length % SMALLEST_BLOCK == 0 and not any(width % HALF_LANES for width in widths)


def _check_splash(q: jax.Array, v: jax.Array, length: int) -> None:
    if not can_splash(q, v, length):
        raise TPUModelError(
            f"splash attention needs multiples of {SMALLEST_BLOCK} tokens and heads of multiples "
            f"of {HALF_LANES}, but queries are {q.shape} and values {v.shape}; change the shapes, "
            "or use attention='xla'."
        )


def _splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spec: AttentionSpec,
    *,
    interpret: bool,
    fused_backward: bool = True,
) -> jax.Array:
    heads, kv_heads = q.shape[2], k.shape[2]
    group = heads // kv_heads
    kernel = _splash_kernel(
        q.shape[1], group, spec.window, spec.soft_cap, interpret, fused_backward
    )
    scaled = q * spec.scale_of(q.shape[-1])
    by_head = [x.transpose(0, 2, 1, 3) for x in (scaled, k, v)]
    batch, _, length, width = by_head[0].shape
    grouped = by_head[0].reshape(batch, kv_heads, group, length, width)
    ids = None if spec.segment_ids is None else splash.SegmentIds(*spec.segment_ids)
    sinks = None if spec.sinks is None else spec.sinks.reshape(kv_heads, group)
    over_heads: Any = jax.vmap(kernel, in_axes=(0, 0, 0, None, None if sinks is None else 0))
    over_batch: Any = jax.vmap(over_heads, in_axes=(0, 0, 0, None if ids is None else 0, None))
    out = over_batch(grouped, by_head[1], by_head[2], ids, sinks)
    return out.reshape(batch, heads, length, v.shape[-1]).transpose(0, 2, 1, 3)


@lru_cache(maxsize=64)
def _splash_kernel(
    length: int,
    queries_per_key: int,
    window: int | None,
    soft_cap: float | None,
    interpret: bool,
    fused_backward: bool,
) -> Any:
    """Return the kernel of one key head; its query heads share keys, which are read once."""
    block = math.gcd(length, LARGEST_BLOCK)
    if window is None:
        mask: Any = splash.CausalMask((length, length))
    else:
        mask = splash.LocalMask((length, length), window_size=(window - 1, 0), offset=0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=None if fused_backward else block,
        block_kv_dq=None if fused_backward else block,
        use_fused_bwd_kernel=fused_backward,
    )
    masks = splash.MultiHeadMask([mask] * queries_per_key)
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mqa_single_device(
            masks,
            block_sizes=sizes,
            attn_logits_soft_cap=soft_cap,
            interpret=interpret,
            residual_checkpoint_name=KEPT_NAME,
        )


splash_attention = KernelAttention(_splash, _check_splash)
# Two backward kernels, one for queries and one for keys, each of which computes the scores. This is
# the setting of recipes without `sa_use_fused_bwd_kernel`; sums stay in VMEM.
splash_attention_in_two = KernelAttention(partial(_splash, fused_backward=False), _check_splash)
