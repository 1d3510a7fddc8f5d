"""What layers keep of the tokens before: keys and values, latents, or a state."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...parallel.sharding.activations import activation_sharding
from ..transformer.config import TransformerConfig
from ..transformer.layer_config import LayerConfig

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
    """Keys and values (layers, rows, slots, heads x channels).

    A token's slot is its position, modulo the slots: a layer that looks back a window has no more
    slots than that, and the newest token takes the place of the one that left the window. Heads
    lie side by side: by themselves, those of 64 channels would leave half of a TPU's tiles empty.
    """

    keys: jax.Array
    values: jax.Array
    heads: int = field(metadata={"static": True})

    def placed(self, place: Place) -> "KeyCache":
        """The same with every leaf in its place."""
        units = (*self.keys.shape[:-1], self.heads)
        both = (
            place(leaf, None, "batch", None, "kv_heads", units=units)
            for leaf in (self.keys, self.values)
        )
        return KeyCache(*both, heads=self.heads)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """What latent attention keeps of a token: (layers, rows, slots, channels)."""

    latent: jax.Array
    rope_key: jax.Array

    def placed(self, place: Place) -> "LatentCache":
        """The same with every leaf in its place; all heads read all of it."""
        both = (place(leaf, None, "batch", None, None) for leaf in (self.latent, self.rope_key))
        return LatentCache(*both)


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


def empty_cache(
    config: TransformerConfig,
    *,
    rows: int,
    slots: int,
    apart: bool = False,
    dtype: str | None = None,
) -> Cache:
    """Room for `slots` tokens in each row; layers that take another's keys have none.

    Args:
        config: Whose layers they are.
        rows: Sequences.
        slots: Tokens of each.
        apart: Whether every layer has arrays of its own, so that nobody cuts them out of others.
        dtype: Of keys, values and latents; None: as wide as activations.
    """
    formats = (dtype or config.dtype, config.dtype)

    def of_kind(kind: str, layers: int) -> Any:
        layer = config.kinds[kind]
        if apart:
            return tuple(_empty(layer, formats, 1, rows, slots) for _ in range(layers))
        return _empty(layer, formats, layers, rows, slots)

    return place_cache(
        {
            kind: of_kind(kind, layers)
            for kind, layers in Counter(config.layer_order).items()
            if config.kinds[kind].shares_keys_of is None
        }
    )


def place_cache(cache: Cache, place: Place = in_place) -> Cache:
    """The cache with every leaf placed by what its dimensions are."""
    return jax.tree.map(
        lambda one: one.placed(place),
        cache,
        is_leaf=lambda one: isinstance(one, KeyCache | LatentCache | DeltaCache),
    )


def index_in_kind(order: tuple[str, ...]) -> list[int]:
    """For every layer, how many of its kind come before it: its place in the cache."""
    return [order[:number].count(kind) for number, kind in enumerate(order)]


def _empty(layer: LayerConfig, formats: tuple[str, str], layers: int, rows: int, slots: int) -> Any:
    dtype, wide = formats
    if layer.delta is not None:
        d = layer.delta
        keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
        state = jnp.zeros((layers, rows, d.value_heads, d.key_dim, d.value_dim), jnp.float32)
        last = (layers, rows, d.convolution - 1)
        q, k, v = (jnp.zeros((*last, width), wide) for width in (keys, keys, values))
        return DeltaCache(state, q, k, v, d.key_heads)
    held = (layers, rows, layer.reach(slots) or slots)
    if layer.latent is not None:
        widths = (layer.latent.kv_rank, layer.latent.rope_dim)
        return LatentCache(*(jnp.zeros((*held, width), dtype) for width in widths))
    shape = (*held, layer.n_kv_heads * layer.head_dim)
    return KeyCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), layer.n_kv_heads)
