"""The two forward passes of generation: a whole prompt, and one token on top of the cache."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..adapters import TransformerAdapter
from ..execution import Execution
from ..remat.policy import NO_REMAT
from ..transformer.config import TransformerConfig
from ..transformer.context import LayerContext
from ..transformer.decoder import DecoderLayer
from ..transformer.mixing import SharedKeys
from ..transformer.model import Transformer
from .cache import Cache, CacheSpec, empty_cache, index_in_kind, turn_of
from .mixing import PromptMixing, TokenMixing
from .preparation import put_together

# (cache of the layer's kind or None, its place in it) -> what the layer mixes tokens with
MakeMixing = Callable[[Any, Any], PromptMixing | TokenMixing]


def read_prompts(
    config: TransformerConfig,
    params: Any,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    slots: int,
    execution: Execution,
    kv: CacheSpec | None = None,
) -> tuple[jax.Array, Cache]:
    """Logits (rows, V) after each prompt's last token, and the cache that holds the prompts.

    Args:
        config: What the parameters are of.
        params: The parameters, as a workload's state has them; without a loop of layers as
            `lay_apart` gives them.
        tokens: (rows, longest) prompts, padded at the end.
        lengths: (rows,) tokens of each prompt; 0 where a row is there to fill the batch only.
        slots: Tokens a row can grow to.
        execution: How attention and experts run.
        kv: How the cache is kept; in the model's own dtype by default.
    """
    model = _module(config, params, execution)
    rows, longest = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(longest), (rows, longest))
    cache = empty_cache(config, rows=rows, slots=slots, apart=not execution.scan_layers, kv=kv)

    def mixing(cache: Any, index: Any) -> PromptMixing:
        return PromptMixing(cache, index, lengths, execution, turn_of(kv))

    x, cache = _run(model, tokens, positions, cache, mixing, length=slots)
    last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
    return model.unembed(last)[:, 0], cache


def read_token(
    config: TransformerConfig,
    params: Any,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
    *,
    slots: int,
    execution: Execution,
    kv: CacheSpec | None = None,
) -> tuple[jax.Array, Cache]:
    """Logits (rows, V) after one more token a row, and the cache that holds it.

    Args:
        config: What the parameters are of.
        params: The parameters.
        tokens: (rows,) the new tokens.
        positions: (rows,) their positions in the sequence.
        cache: Everything before them.
        slots: Tokens a row can grow to.
        execution: How experts, and attention over the cache, run.
        kv: How the cache is kept.
    """
    model = _module(config, params, execution)

    def mixing(cache: Any, index: Any) -> TokenMixing:
        return TokenMixing(cache, index, positions, turn_of(kv), execution.slots)

    x, cache = _run(model, tokens[:, None], positions[:, None], cache, mixing, length=slots)
    return model.unembed(x)[:, 0], cache


def _module(config: TransformerConfig, params: Any, execution: Execution) -> Transformer:
    # Here and not before the loop over tokens: across its edge the compiler does not see that
    # what is put together was only laid apart.
    whole = params if execution.scan_layers else put_together(params)
    return TransformerAdapter(config).module(whole, execution)


def _run(
    model: Transformer,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
    mixing: MakeMixing,
    *,
    length: int,
) -> tuple[jax.Array, Cache]:
    """Send tokens through all layers; the cache is carried, so that it is written in place."""
    x = model.embed_tokens(tokens, positions)
    own = None if model.per_layer is None else model.per_layer(tokens, x)
    context = LayerContext(positions, length, model.execution, mixing(None, 0))
    index = jnp.asarray(index_in_kind(model.config.layer_order), jnp.int32)

    scan = model.execution.scan_layers
    met: Counter[str] = Counter()  # layers of each kind, where they are traced one by one

    def one_layer(
        layer: DecoderLayer, carry: Any, inputs: Any, shared: Mapping[str, SharedKeys], kind: str
    ) -> Any:
        (x, cache), (own, index) = carry, inputs
        held = cache.get(kind)
        place, met[kind] = met[kind], met[kind] + 1
        used = mixing(held, index) if scan or held is None else mixing(held[place], 0)
        result = layer(x, context.replace(mixing=used, per_layer=own, shared=shared))
        if held is not None:
            kept = used.cache if scan else (*held[:place], used.cache, *held[place + 1 :])
            cache = {**cache, kind: kept}
        return (result.x, cache), None, result.keys

    carried, _ = model.walk(
        one_layer,
        (x, cache),
        stacked=nnx.state(model.layers),
        inputs=(own, index),
        remat=NO_REMAT,
        scan=scan,
        round_in_turn=False,
    )
    return carried
