"""The two forward passes of generation: a whole prompt, and one token on top of the cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..adapters import TransformerAdapter
from ..attention.choice import automatic_attention
from ..execution import Execution
from ..transformer.config import TransformerConfig
from ..transformer.decoder import LayerContext
from ..transformer.model import Transformer


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


# (cache, number of the layer) -> the attention of that layer
MakeAttention = Callable[[KVCache, Any], PromptAttention | TokenAttention]


def read_prompts(
    config: TransformerConfig, params: Any, tokens: jax.Array, lengths: jax.Array, *, slots: int
) -> tuple[jax.Array, KVCache]:
    """Logits (rows, V) after each prompt's last token, and the cache that holds the prompts.

    Args:
        config: What the parameters are of.
        params: The parameters, as a workload's state has them.
        tokens: (rows, longest) prompts, padded at the end.
        lengths: (rows,) tokens of each prompt.
        slots: Tokens a row can grow to.
    """
    model = _module(config, params)
    rows, longest = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(longest), (rows, longest))
    cache = KVCache.empty(config, rows=rows, slots=slots)
    x, cache = _run(model, model.embed_tokens(tokens), positions, cache, PromptAttention)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    return model.unembed(last)[:, 0], cache


def read_token(
    config: TransformerConfig, params: Any, tokens: jax.Array, positions: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Logits (rows, V) after one more token a row, and the cache that holds it.

    Args:
        config: What the parameters are of.
        params: The parameters.
        tokens: (rows,) the new tokens.
        positions: (rows,) their positions in the sequence.
        cache: Everything before them.
    """
    model = _module(config, params)
    where = positions[:, None]

    def attention(cache: KVCache, layer: Any) -> TokenAttention:
        return TokenAttention(cache, layer, positions)

    x = model.embed_tokens(tokens[:, None], where)
    x, cache = _run(model, x, where, cache, attention)
    return model.unembed(x)[:, 0], cache


def _module(config: TransformerConfig, params: Any) -> Transformer:
    return TransformerAdapter(config).module(params, Execution())


def _run(
    model: Transformer, x: jax.Array, positions: jax.Array, cache: KVCache, attention: MakeAttention
) -> tuple[jax.Array, KVCache]:
    """Send `x` through all layers; the cache is carried, so that it is written in index."""
    definition, stacked = nnx.graphdef(model.layers), nnx.state(model.layers)
    n_layers, period = model.config.n_layers, model.config.layer_period
    groups = n_layers // period

    def one_layer(carry: Any, parameters: Any, layer: Any, index: int) -> Any:
        x, cache = carry
        attend = attention(cache, layer)
        context = LayerContext(positions, None, Execution(attention=attend))
        decoder_layer = nnx.merge(definition, parameters)
        x, _ = decoder_layer(x, model.config.window_of_layer(index), context)
        return x, attend.cache

    def one_group(carry: Any, group: Any) -> tuple[Any, None]:
        parameters, first = group
        for index in range(period):
            one = jax.tree.map(lambda leaf, index=index: leaf[index], parameters)
            carry = one_layer(carry, one, first + index, index)
        return carry, None

    whole = groups * period
    grouped = jax.tree.map(
        lambda leaf: leaf[:whole].reshape(groups, period, *leaf.shape[1:]), stacked
    )
    firsts = jnp.arange(groups, dtype=jnp.int32) * period
    carry, _ = jax.lax.scan(one_group, (x, cache), (grouped, firsts))
    for layer in range(whole, n_layers):
        one = jax.tree.map(lambda leaf, layer=layer: leaf[layer], stacked)
        carry = one_layer(carry, one, layer, layer % period)
    return carry
