"""Attention of one new token over a cache, by XLA or by the kernel that also writes the token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...annotations import AnyMesh
from ...hardware.target import current_target
from ...kernels.ops.flash_attention.slots import attend_slots_adding, can_attend_slots
from ...kernels.partition.sharded_call import sharded_call
from ...parallel.mesh.mesh import axis_sizes
from ..transformer.layer_config import LayerConfig
from ..transformer.mixing import Latents, SharedKeys, attention_spec
from .cache import KeyCache
from .cache_slots import PlainSlots, Rotation, positions_held, unrotated


def visible_slots(layer: LayerConfig, positions: jax.Array, slots: int) -> jax.Array:
    """Return the attention mask (rows, slots) of the newest token."""
    held = positions_held(positions, slots)
    return (held >= 0) & attention_spec(layer).allows(positions[:, None], held)


def attend_slots(
    layer: LayerConfig,
    q: jax.Array,
    keys: SharedKeys,
    positions: jax.Array,
    *,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Return attention of q (rows, 1, H, D) over keys and values (rows, slots, KV, D).

    Keys and values are cast to the dtype of q first, because mixed-format matmuls are far slower
    in XLA.
    """
    keys = SharedKeys(keys.k.astype(q.dtype), keys.v.astype(q.dtype))
    seen = visible_slots(layer, positions, keys.k.shape[1])
    if sinks is None and layer.attention_soft_cap is None:
        return jax.nn.dot_product_attention(
            q, keys.k, keys.v, mask=seen[:, None, None], scale=layer.attention_scale
        )
    rows, _, heads, width = q.shape
    grouped = q.reshape(rows, keys.k.shape[2], -1, width)
    scores = _wide("bkgd,bskd->bkgs", grouped, keys.k)
    weights = _weigh(layer, scores, seen[:, None, None], width, sinks)
    return _wide("bkgs,bskd->bkgd", weights, keys.v).astype(q.dtype).reshape(rows, 1, heads, -1)


def attend_latents(
    layer: LayerConfig,
    q: tuple[jax.Array, jax.Array],
    latents: Latents,
    matrices: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    *,
    rotate: Rotation = unrotated,
) -> jax.Array:
    """Return latent attention (rows, 1, H, v_dim) of one token, computed on latents.

    Queries are multiplied with the key projection and outputs with the value projection, so the
    slots of a row are read once for all heads and keys and values are never expanded.

    Args:
        layer: The layer.
        q: (rows, 1, H, nope_dim) and (rows, 1, H, rope_dim).
        latents: (rows, slots, kv_rank) and (rows, slots, rope_dim).
        matrices: (kv_rank, H, nope_dim) and (kv_rank, H, v_dim).
        positions: (rows,) positions of the tokens.
        rotate: The rotation of the channels of `latents`.
    """
    (nope, rope), (to_keys, to_values) = q, matrices
    in_latents = _wide("bhn,rhn->bhr", nope[:, 0], to_keys).astype(nope.dtype)
    latents = Latents(*(array.astype(nope.dtype) for array in latents))
    scores = _wide("bhr,bsr->bhs", rotate(in_latents), latents.latent)
    scores += _wide("bhd,bsd->bhs", rotate(rope[:, 0]), latents.rope_key)
    seen = visible_slots(layer, positions, latents.latent.shape[1])
    weights = _weigh(layer, scores, seen[:, None], layer.qk_dim, None)
    mixed = rotate(_wide("bhs,bsr->bhr", weights.astype(nope.dtype), latents.latent))
    return _wide("bhr,rhv->bhv", mixed.astype(nope.dtype), to_values).astype(nope.dtype)[:, None]


def _weigh(
    layer: LayerConfig, scores: jax.Array, seen: jax.Array, width: int, sinks: jax.Array | None
) -> jax.Array:
    spec = attention_spec(layer)
    scores, _ = spec.cap(scores * spec.scale_of(width))
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    grouped = sinks.reshape(1, *scores.shape[1:-1], 1).astype(scores.dtype)
    with_sink = jnp.concatenate([scores, jnp.broadcast_to(grouped, (*scores.shape[:-1], 1))], -1)
    return jax.nn.softmax(with_sink, axis=-1)[..., :-1]


def _wide(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return an einsum with sums in at least float32."""
    wide = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
    return jnp.einsum(equation, a, b, preferred_element_type=wide)


@dataclasses.dataclass(frozen=True)
class SlotKernel:
    """The kernel for one token over a cache, on each device's rows and heads.

    Attributes:
        mesh: The mesh of the arrays.
        batch_axes: Mesh axes that shard the rows.
        head_axes: Mesh axes that shard the heads.
    """

    mesh: AnyMesh
    batch_axes: tuple[str, ...]
    head_axes: tuple[str, ...]

    def takes(self, q: jax.Array, cache: KeyCache, sinks: jax.Array | None) -> bool:
        """Whether the kernel supports q (rows, 1, heads, channels) and the cache.

        XLA slices each layer's keys from the cache and changes their layout. Four layers of
        llama3.1-8b with 64 rows of 2,048 tokens on one v6e take 9.8 ms per token with XLA and
        3.7 ms with the kernel, by their timelines. With one key head per device (v6e-8) they take
        0.79 and 0.77 ms. Quantized caches use XLA.
        """
        sizes = axis_sizes(self.mesh)
        ways = 1
        for axis in self.head_axes:
            ways *= sizes[axis]
        keys, values = cache.keys, cache.values
        return (
            current_target() is not None
            and sinks is None
            and isinstance(keys, PlainSlots)
            and isinstance(values, PlainSlots)
            and keys.array.dtype.itemsize <= q.dtype.itemsize
            and keys.units % ways == 0
            and can_attend_slots(q[:, 0], keys.array, values.array)
        )

    def attend(
        self,
        layer: LayerConfig,
        q: jax.Array,
        new: SharedKeys,
        cache: KeyCache,
        index: Any,
        positions: jax.Array,
    ) -> tuple[jax.Array, KeyCache]:
        """Return attention (rows, 1, heads, channels), and the cache with the new tokens.

        Args:
            layer: The layer.
            q: (rows, 1, heads, channels).
            new: Keys and values (rows, 1, heads, channels) of the same tokens.
            cache: The cache of all layers of the kind.
            index: The layer's index in the cache.
            positions: (rows,) positions of the tokens.
        """
        both = [slots for slots in (cache.keys, cache.values) if isinstance(slots, PlainSlots)]
        assert len(both) == 2  # see `takes`
        spec = attention_spec(layer)

        def local(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> Any:
            keys, values, index, positions = rest
            return attend_slots_adding(
                q,
                (k.reshape(k.shape[0], -1), v.reshape(v.shape[0], -1)),
                (keys, values),
                index,
                positions,
                spec,
            )

        rows, heads = self.batch_axes or None, self.head_axes or None
        one, slots = PartitionSpec(rows, heads), PartitionSpec(None, rows, None, heads)
        in_specs = (one, one, one, slots, slots, PartitionSpec(), PartitionSpec(rows))
        call = sharded_call(local, self.mesh, in_specs=in_specs, out_specs=(one, slots, slots))
        out, keys, values = call(
            *(array[:, 0] for array in (q, new.k, new.v)),
            *(slots.array for slots in both),
            *(jax.numpy.asarray(index), positions),
        )
        added = zip(both, (keys, values), strict=True)
        return out[:, None], KeyCache(*(dataclasses.replace(old, array=a) for old, a in added))
