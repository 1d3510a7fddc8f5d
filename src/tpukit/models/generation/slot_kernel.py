"""Attention over a cache by the kernel that also adds the token, on the mesh generation runs on."""

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ...annotations import AnyMesh
from ...hardware.target import current_target
from ...kernels.ops.flash_attention.slots import attend_slots_adding, can_attend_slots
from ...parallel.mesh.manual_axes import axes_to_take
from ...parallel.mesh.mesh import axis_sizes
from ..transformer.layer_config import LayerConfig
from ..transformer.mixing import SharedKeys
from .cache import KeyCache
from .held import WideSlots


@dataclasses.dataclass(frozen=True)
class SlotKernel:
    """Where the kernel runs: on each device's rows and heads.

    Attributes:
        mesh: What the arrays are spread over.
        batch_axes: Mesh axes that split the rows.
        head_axes: Mesh axes that split the heads.
    """

    mesh: AnyMesh
    batch_axes: tuple[str, ...]
    head_axes: tuple[str, ...]

    def takes(self, q: jax.Array, cache: KeyCache, sinks: jax.Array | None) -> bool:
        """Whether q (rows, 1, heads, channels) attends by the kernel.

        XLA cuts each layer's keys out of the cache and lays them out anew: four layers of
        llama3.1-8b, 64 rows of 2,048 tokens on one v6e, take 9.8 ms a token so and 3.7 with the
        kernel, by their timelines; a head of keys a device takes 0.79 and 0.77 (v6e-8). Codes under
        scales are XLA's.
        """
        sizes = axis_sizes(self.mesh)
        ways = 1
        for axis in self.head_axes:
            ways *= sizes[axis]
        keys, values = cache.keys, cache.values
        return (
            current_target() is not None
            and sinks is None
            and isinstance(keys, WideSlots)
            and isinstance(values, WideSlots)
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
        """Attention (rows, 1, heads, channels), and the cache with the new tokens in it.

        Args:
            layer: Whose attention it is.
            q: (rows, 1, heads, channels).
            new: Keys and values (rows, 1, heads, channels) of the same tokens.
            cache: Of all layers of the kind.
            index: The layer's place in it.
            positions: (rows,) of the tokens.
        """
        held = [one for one in (cache.keys, cache.values) if isinstance(one, WideSlots)]
        assert len(held) == 2  # see `takes`
        scale = q.shape[-1] ** -0.5 if layer.attention_scale is None else layer.attention_scale

        def local(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> Any:
            keys, values, index, positions = rest
            return attend_slots_adding(
                q,
                (k.reshape(k.shape[0], -1), v.reshape(v.shape[0], -1)),
                (keys, values),
                index,
                positions,
                scale=scale,
                window=layer.sliding_window,
                chunk=layer.attention_chunk,
                soft_cap=layer.attention_soft_cap,
            )

        rows, heads = self.batch_axes or None, self.head_axes or None
        one, slots = PartitionSpec(rows, heads), PartitionSpec(None, rows, None, heads)
        around, free = axes_to_take(self.mesh)
        call: Any = jax.shard_map(
            local,
            mesh=around,
            in_specs=(one, one, one, slots, slots, PartitionSpec(), PartitionSpec(rows)),
            out_specs=(one, slots, slots),
            axis_names=free,
            check_vma=False,
        )
        out, keys, values = call(
            *(array[:, 0] for array in (q, new.k, new.v)),
            *(one.array for one in held),
            *(jax.numpy.asarray(index), positions),
        )
        added = zip(held, (keys, values), strict=True)
        return out[:, None], KeyCache(*(dataclasses.replace(one, array=a) for one, a in added))
