"""Keys and values of every token seen so far, and attention that reads them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..attention.choice import automatic_attention
from ..transformer.config import TransformerConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values (layers, rows, slots, heads, head_dim); a token's slot is its position.

    A slot past a row's last token may hold anything: attention masks by position.
    """

    keys: jax.Array
    values: jax.Array

    @classmethod
    def empty(cls, config: TransformerConfig, *, rows: int, slots: int) -> "KVCache":
        """Room for `slots` tokens in each row."""
        shape = (config.n_layers, rows, slots, config.n_kv_heads, config.head_dim)
        return cls(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))

    def with_prompt(self, layer: Any, keys: jax.Array, values: jax.Array) -> "KVCache":
        """The cache with slots 0, 1, 2 … of every row written, for one layer."""
        start = (layer, 0, 0, 0, 0)
        return KVCache(
            jax.lax.dynamic_update_slice(self.keys, keys[None], start),
            jax.lax.dynamic_update_slice(self.values, values[None], start),
        )

    def with_token(
        self, layer: Any, slots: jax.Array, keys: jax.Array, values: jax.Array
    ) -> "KVCache":
        """The cache with one slot of each row written, for one layer."""
        where = (layer, jnp.arange(slots.shape[0]), slots)
        return KVCache(self.keys.at[where].set(keys[:, 0]), self.values.at[where].set(values[:, 0]))


class PromptAttention:
    """Causal attention over whole prompts that leaves their keys and values in `cache`.

    An instance lives for one layer of one trace: the layer calls it as it would any attention.
    """

    def __init__(self, cache: KVCache, layer: Any) -> None:
        self.cache, self._layer = cache, layer

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Attend; prompts are padded at their ends, where no token of theirs looks."""
        self.cache = self.cache.with_prompt(self._layer, k, v)
        return automatic_attention(q, k, v, window=window, segment_ids=segment_ids)


class TokenAttention:
    """Attention of one new token a row over the cache, to which it is added first."""

    def __init__(self, cache: KVCache, layer: Any, positions: jax.Array) -> None:
        self.cache, self._layer, self._positions = cache, layer, positions

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Attend to the slots up to the row's own position, as far back as the window goes."""
        self.cache = self.cache.with_token(self._layer, self._positions, k, v)
        keys, values = self.cache.keys[self._layer], self.cache.values[self._layer]
        slots, now = jnp.arange(keys.shape[1])[None], self._positions[:, None]
        seen = slots <= now
        if window is not None:
            seen &= slots > now - window
        return jax.nn.dot_product_attention(q, keys, values, mask=seen[:, None, None])
