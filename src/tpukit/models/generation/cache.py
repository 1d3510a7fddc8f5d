"""What layers keep of the tokens before: keys and values, latents, or a state."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...parallel.sharding.activations import constrain
from ..transformer.config import TransformerConfig
from ..transformer.layer_config import LayerConfig

# (leaf, what each of its dimensions is) -> the leaf at its place.
Place = Callable[..., Any]
# By the kind of layer; leaves have a leading axis of the layers of that kind.
Cache = dict[str, Any]
# What the dimensions of each leaf are, by its name: rows are split like a batch, heads like heads.
_OF_LATENTS = (None, "batch", None, None)
_OF_CONVOLUTIONS = (None, "batch", None, "heads")
CACHE_AXES: dict[str, tuple[str | None, ...]] = {
    "keys": (None, "batch", None, "kv_heads", "head_dim"),
    "values": (None, "batch", None, "kv_heads", "head_dim"),
    "latent": _OF_LATENTS,
    "rope_key": _OF_LATENTS,
    "state": (None, "batch", "heads", None, None),
    "q": _OF_CONVOLUTIONS,
    "k": _OF_CONVOLUTIONS,
    "v": _OF_CONVOLUTIONS,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyCache:
    """Keys and values (layers, rows, slots, heads, channels).

    A token's slot is its position, modulo the slots: a layer that looks back a window has no more
    slots than that, and the newest token takes the place of the one that left the window.
    """

    keys: jax.Array
    values: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """What latent attention keeps of a token: (layers, rows, slots, channels)."""

    latent: jax.Array
    rope_key: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaCache:
    """The state (layers, rows, heads, channels, channels) and the last inputs of convolutions."""

    state: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array


def empty_cache(config: TransformerConfig, *, rows: int, slots: int) -> Cache:
    """Room for `slots` tokens in each row; layers that take another's keys have none."""
    return place_cache(
        {
            kind: _empty(config.kinds[kind], config.dtype, layers, rows, slots)
            for kind, layers in Counter(config.layer_order).items()
            if config.kinds[kind].shares_keys_of is None
        }
    )


def place_cache(cache: Cache, place: Place = constrain) -> Cache:
    """The cache with every leaf placed by what its dimensions are."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: place(leaf, *CACHE_AXES[path[-1].name]), cache
    )


def index_in_kind(order: tuple[str, ...]) -> list[int]:
    """For every layer, how many of its kind come before it: its place in the cache."""
    return [order[:number].count(kind) for number, kind in enumerate(order)]


def _empty(layer: LayerConfig, dtype: str, layers: int, rows: int, slots: int) -> Any:
    if layer.delta is not None:
        d = layer.delta
        keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
        state = jnp.zeros((layers, rows, d.value_heads, d.key_dim, d.value_dim), jnp.float32)
        last = (layers, rows, d.convolution - 1)
        q, k, v = (jnp.zeros((*last, width), dtype) for width in (keys, keys, values))
        return DeltaCache(state, q, k, v)
    held = (layers, rows, layer.reach(slots) or slots)
    if layer.latent is not None:
        widths = (layer.latent.kv_rank, layer.latent.rope_dim)
        return LatentCache(*(jnp.zeros((*held, width), dtype) for width in widths))
    shape = (*held, layer.n_kv_heads, layer.head_dim)
    return KeyCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
