"""The cache of generation: keys and values, latents, or a recurrent state per layer."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import TPUValidationError
from ...hardware.stored_formats import CacheFormat, Unit, parse_cache_format
from ...parallel.sharding.activations import activation_sharding
from ..transformer.config import TransformerConfig
from ..transformer.layer_config import LayerConfig
from .cache_slots import (
    WIDE,
    CacheBook,
    CacheSlots,
    PlainSlots,
    QuantizedSlots,
    Rotation,
    rotate,
    unrotated,
)

# (leaf, names of its dimensions, units per dimension where that is not its size) -> placed leaf.
Place = Callable[..., Any]
# By kind of layer: one cache whose leaves have a leading axis of layers, or a tuple with one cache
# per layer where layers are unrolled.
Cache = dict[str, Any]


def in_place(x: Any, *dimensions: str | None, units: tuple[int, ...] | None = None) -> Any:
    """Constrain an array's sharding by the current activation rules.

    Args:
        x: The array.
        dimensions: The name of each dimension; see `constrain`.
        units: Units per dimension, where that is not its size, as for concatenated heads.
    """
    sharding = activation_sharding(units or x.shape, *dimensions)
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyCache:
    """Keys and values of heads.

    A layer with a sliding window has only as many slots, and the newest token overwrites the one
    that left the window.
    """

    keys: CacheSlots
    values: CacheSlots

    def placed(self, place: Place) -> "KeyCache":
        """Return the cache with every leaf placed."""
        return KeyCache(*(slots.placed(place, "kv_heads") for slots in (self.keys, self.values)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """Latents and rotated keys of latent attention, one unit for all heads."""

    latent: CacheSlots
    rope_key: CacheSlots

    def placed(self, place: Place) -> "LatentCache":
        """Return the cache with every leaf placed; heads are not sharded."""
        return LatentCache(*(slots.placed(place, None) for slots in (self.latent, self.rope_key)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaCache:
    """The state (layers, rows, heads, channels, channels) and the last inputs of convolutions."""

    state: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    key_heads: int = field(metadata={"static": True})

    def placed(self, place: Place) -> "DeltaCache":
        """Return the cache with every leaf placed."""
        counts = (self.key_heads, self.key_heads, self.state.shape[2])
        q, k, v = (
            place(leaf, None, "batch", None, "heads", units=(*leaf.shape[:-1], heads))
            for leaf, heads in zip((self.q, self.k, self.v), counts, strict=True)
        )
        state = place(self.state, None, "batch", "heads", None, None)
        return replace(self, state=state, q=q, k=k, v=v)


@dataclass(frozen=True, eq=False)
class CacheSpec:
    """The format of keys, values and latents.

    Attributes:
        format: The format of all of them.
        books: Codebooks by kind of layer and by name ("keys", "values", "latent", "rope_key"), with
            a leading axis of the layers of that kind; empty for integers.
    """

    format: CacheFormat
    books: Mapping[str, Mapping[str, CacheBook]] = field(default_factory=dict)

    @classmethod
    def of(cls, kv: "CacheSpec | CacheFormat | str") -> "CacheSpec":
        """Return the specification of a name or a format.

        Raises:
            TPUValidationError: The format is unknown, or needs codebooks.
        """
        if isinstance(kv, CacheSpec):
            return kv
        format = parse_cache_format(kv)
        if format.entries:
            raise TPUValidationError(
                f"a KV cache in {format.name} needs codebooks fitted to the model's keys and "
                "values; fit them with tpukit.quantization.fit_cache(…), or on the command line "
                f"with 'tpukit quantize MODEL --kv {format.name} --calibration DATA -o FOLDER' and "
                "'tpukit generate MODEL --kv FOLDER'."
            )
        return cls(format)

    def slots(
        self, kind: str, name: str, sizes: tuple[int, int, int], unit: Unit, layer: int | None
    ) -> CacheSlots:
        """Return empty slots of sizes (layers, rows, slots) for a layer or all layers of a kind."""
        if not self.format.narrows(sizes[2]):
            dtype = WIDE if self.format.is_narrow else self.format.codes.name
            return PlainSlots.empty(sizes, *unit, dtype)
        book = self.books.get(kind, {}).get(name)
        if book is not None and layer is not None:
            book = jax.tree.map(lambda leaf: leaf[layer : layer + 1], book)
        return QuantizedSlots.empty(sizes, *unit, self.format, book)


def empty_cache(
    config: TransformerConfig,
    *,
    rows: int,
    slots: int,
    apart: bool = False,
    kv: CacheSpec | None = None,
) -> Cache:
    """Return an empty cache; layers that share another layer's keys have none.

    Args:
        config: The model.
        rows: Sequences.
        slots: Tokens per sequence.
        apart: Whether every layer has arrays of its own instead of slices of a stack.
        kv: The format; the model's own dtype by default.
    """

    def of_kind(kind: str, layers: int) -> Any:
        if apart:
            return tuple(_empty(config, kind, 1, rows, slots, kv, n) for n in range(layers))
        return _empty(config, kind, layers, rows, slots, kv, None)

    return place_cache(
        {
            kind: of_kind(kind, layers)
            for kind, layers in Counter(config.layer_order).items()
            if config.kinds[kind].shares_keys_of is None
        }
    )


def kept_units(layer: LayerConfig) -> dict[str, Unit]:
    """Return the cached units of a token by name; empty for a layer with a recurrent state."""
    if layer.delta is not None:
        return {}
    if layer.latent is not None:
        latent = layer.latent
        return {"latent": Unit(1, latent.kv_rank), "rope_key": Unit(1, latent.rope_dim)}
    head = Unit(layer.n_kv_heads, layer.head_dim)
    return {"keys": head, "values": head}


def place_cache(cache: Cache, place: Place = in_place) -> Cache:
    """Return the cache with every leaf placed by the names of its dimensions."""
    return jax.tree.map(
        lambda one: one.placed(place),
        cache,
        is_leaf=lambda one: isinstance(one, KeyCache | LatentCache | DeltaCache),
    )


def rotation_of(kv: CacheSpec | None) -> Rotation:
    """Return the rotation of channels before they are cached."""
    return rotate if kv is not None and kv.format.is_narrow else unrotated


def index_in_kind(order: tuple[str, ...]) -> list[int]:
    """Return for every layer its index among the layers of its kind."""
    return [order[:number].count(kind) for number, kind in enumerate(order)]


def _empty(
    config: TransformerConfig,
    kind: str,
    layers: int,
    rows: int,
    slots: int,
    kv: CacheSpec | None,
    number: int | None,
) -> Any:
    layer, dtype = config.kinds[kind], config.dtype
    if layer.delta is not None:
        d = layer.delta
        keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
        state = jnp.zeros((layers, rows, d.value_heads, d.key_dim, d.value_dim), jnp.float32)
        last = (layers, rows, d.convolution - 1)
        q, k, v = (jnp.zeros((*last, width), dtype) for width in (keys, keys, values))
        return DeltaCache(state, q, k, v, d.key_heads)
    sizes = (layers, rows, layer.reach(slots) or slots)

    def empty_slots(name: str, unit: Unit) -> CacheSlots:
        if kv is None:
            return PlainSlots.empty(sizes, *unit, dtype)
        return kv.slots(kind, name, sizes, unit, number)

    made = [empty_slots(name, unit) for name, unit in kept_units(layer).items()]
    return LatentCache(*made) if layer.latent is not None else KeyCache(*made)
