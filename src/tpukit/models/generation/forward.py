"""The two forward passes of generation: a whole prompt, and one token on top of the cache."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..adapters import TransformerAdapter
from ..execution import Execution
from ..transformer.config import TransformerConfig
from ..transformer.decoder import LayerContext
from ..transformer.model import Transformer
from .cache import KVCache, PromptAttention, TokenAttention

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
