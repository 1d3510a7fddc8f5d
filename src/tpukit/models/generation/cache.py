"""What layers keep of the tokens before: keys and values, latents, or a state."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import TPUValidationError
from ...hardware.cache_formats import CacheFormat, Unit, parse_cache_format
from ...parallel.sharding.activations import activation_sharding
from ..transformer.config import TransformerConfig
from ..transformer.layer_config import LayerConfig
from .held import WIDE, Held, NarrowSlots, WideSlots
from .slots import Turn, as_it_is
from .token_codes import CacheBook, turned

# (leaf, what its dimensions are, `units` of each where that is not their size) -> leaf in place.
Place = Callable[..., Any]
# By the kind of layer: one whose leaves have a leading axis of the layers of that kind, or one for
# each layer, where layers are not a loop.
Cache = dict[str, Any]


def in_place(x: Any, *dimensions: str | None, units: tuple[int, ...] | None = None) -> Any:
    """Put an array where the rules in force say: rows like a batch, heads like heads.

    Args:
        x: The array.
        dimensions: What each of its dimensions is; see `constrain`.
        units: How many of it each has, where that is not its size: heads that lie side by side.
    """
    sharding = activation_sharding(units or x.shape, *dimensions)
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyCache:
    """Keys and values of heads.

    A layer that looks back a window has no more slots than that, and the newest token takes the
    place of the one that left the window.
    """

    keys: Held
    values: Held

    def placed(self, place: Place) -> "KeyCache":
        """The same with every leaf in its place."""
        return KeyCache(*(one.placed(place, "kv_heads") for one in (self.keys, self.values)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """What latent attention keeps of a token, one unit for all heads."""

    latent: Held
    rope_key: Held

    def placed(self, place: Place) -> "LatentCache":
        """The same with every leaf in its place; all heads read all of it."""
        return LatentCache(*(one.placed(place, None) for one in (self.latent, self.rope_key)))


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
        """The same with every leaf in its place."""
        counts = (self.key_heads, self.key_heads, self.state.shape[2])
        q, k, v = (
            place(leaf, None, "batch", None, "heads", units=(*leaf.shape[:-1], heads))
            for leaf, heads in zip((self.q, self.k, self.v), counts, strict=True)
        )
        state = place(self.state, None, "batch", "heads", None, None)
        return replace(self, state=state, q=q, k=k, v=v)


@dataclass(frozen=True, eq=False)
class CacheSpec:
    """How keys, values and latents are kept.

    Attributes:
        format: Of all of them.
        books: Codebooks by the kind of layer and by what they are of ("keys", "values", "latent",
            "rope_key"), with a leading axis of the layers of that kind; empty for integers.
    """

    format: CacheFormat
    books: Mapping[str, Mapping[str, CacheBook]] = field(default_factory=dict)

    @classmethod
    def of(cls, kv: "CacheSpec | CacheFormat | str") -> "CacheSpec":
        """The specification that a name, a format or itself stands for.

        Raises:
            TPUValidationError: There is no such format, or it needs codebooks.
        """
        if isinstance(kv, CacheSpec):
            return kv
        format = parse_cache_format(kv)
        if format.entries:
            raise TPUValidationError(
                f"a KV cache in {format.name} needs codebooks of the model's own keys and values; "
                "fit them with tpukit.quantization.fit_cache(…), or on the command line with "
                f"'tpukit quantize MODEL --kv {format.name} --calibration DATA -o FOLDER' and "
                "'tpukit generate MODEL --kv FOLDER'."
            )
        return cls(format)

    def slots(
        self, kind: str, name: str, held: tuple[int, int, int], unit: Unit, layer: int | None
    ) -> Held:
        """Room for (layers, rows, slots) tokens of a layer, or of all layers of a kind."""
        if not self.format.narrows(held[2]):
            dtype = WIDE if self.format.is_narrow else self.format.codes.name
            return WideSlots.empty(held, *unit, dtype)
        book = self.books.get(kind, {}).get(name)
        if book is not None and layer is not None:
            book = jax.tree.map(lambda leaf: leaf[layer : layer + 1], book)
        return NarrowSlots.empty(held, *unit, self.format, book)


def empty_cache(
    config: TransformerConfig,
    *,
    rows: int,
    slots: int,
    apart: bool = False,
    kv: CacheSpec | None = None,
) -> Cache:
    """Room for `slots` tokens in each row; layers that take another's keys have none.

    Args:
        config: Whose layers they are.
        rows: Sequences.
        slots: Tokens of each.
        apart: Whether every layer has arrays of its own, so that nobody cuts them out of others.
        kv: How they are kept; in the model's own dtype by default.
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
    """What a layer keeps of a token, by name; nothing where it keeps a state."""
    if layer.delta is not None:
        return {}
    if layer.latent is not None:
        latent = layer.latent
        return {"latent": Unit(1, latent.kv_rank), "rope_key": Unit(1, latent.rope_dim)}
    head = Unit(layer.n_kv_heads, layer.head_dim)
    return {"keys": head, "values": head}


def place_cache(cache: Cache, place: Place = in_place) -> Cache:
    """The cache with every leaf placed by what its dimensions are."""
    return jax.tree.map(
        lambda one: one.placed(place),
        cache,
        is_leaf=lambda one: isinstance(one, KeyCache | LatentCache | DeltaCache),
    )


def turn_of(kv: CacheSpec | None) -> Turn:
    """What channels go through before they are kept."""
    return turned if kv is not None and kv.format.is_narrow else as_it_is


def index_in_kind(order: tuple[str, ...]) -> list[int]:
    """For every layer, how many of its kind come before it: its place in the cache."""
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
    held = (layers, rows, layer.reach(slots) or slots)

    def room(name: str, unit: Unit) -> Held:
        if kv is None:
            return WideSlots.empty(held, *unit, dtype)
        return kv.slots(kind, name, held, unit, number)

    made = [room(name, unit) for name, unit in kept_units(layer).items()]
    return LatentCache(*made) if layer.latent is not None else KeyCache(*made)
