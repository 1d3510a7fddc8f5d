"""Multi-token prediction: extra layers that learn to predict tokens after the next one.

As in DeepSeek-V3, depth k reads the output of depth k - 1 at a token and the embedding of the token
k positions later, and predicts the token after that. It uses the model's embedding and unembedding.
Only training runs these layers; generation skips them.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ...annotations import PyTree
from ...parallel.experts.routing import RouterStats
from ...parallel.ring.order import from_zigzag, to_zigzag
from .config import TransformerConfig
from .decoder import DecoderLayer, LayerResult
from .layers import Linear, Norm
from .mixing import LayerContext


class PredictionLayer(nnx.Module):
    """One depth: a projection of two normed vectors, then a layer like the model's last one."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        d, kind = config.d_model, config.layer_order[-1]

        def norm() -> Norm:
            return Norm(d, config, param_dtype=config.param_dtype)

        self.embed_norm, self.hidden_norm = norm(), norm()
        self.proj = Linear(2 * d, d, config, rngs=rngs)
        self.block = DecoderLayer(config, config.kinds[kind], rngs=rngs)
        self.final_norm = norm()

    def __call__(
        self, hidden: jax.Array, embedded: jax.Array, context: LayerContext
    ) -> LayerResult:
        """Return the layer's result; the caller applies `final_norm`."""
        both = jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        return self.block(self.proj(both), context)


class Prediction(NamedTuple):
    """The prediction of one depth and its targets.

    Attributes:
        normed: (B, S, d_model) for the unembedding.
        targets: (B, S); negative where the sequence or document ends earlier.
        router: Router statistics, where the layer has experts.
    """

    normed: jax.Array
    targets: jax.Array
    router: RouterStats | None


class PredictionLayers(nnx.Module):
    """All depths, with stacked parameters."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=config.mtp_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> PredictionLayer:
            return PredictionLayer(config, rngs=rngs)

        self.depths = config.mtp_layers
        self.layers = stack(rngs)

    def __call__(
        self,
        hidden: jax.Array,
        tokens: jax.Array,
        targets: jax.Array,
        context: LayerContext,
        *,
        segment_ids: jax.Array | None,
        embed: Callable[[jax.Array], jax.Array],
    ) -> Iterator[Prediction]:
        """Yield the prediction of each depth.

        Args:
            hidden: (B, S, d_model) the normed output of the last layer, as in servers of published
                weights.
            tokens: (B, S) the inputs.
            targets: (B, S) the next token of each.
            context: The context that the layers share.
            segment_ids: (B, S) number of the packed document that a token belongs to.
            embed: The model's embedding of tokens.
        """
        definition, stacked = nnx.split(self.layers)
        zigzag, segments = context.execution.zigzag, segment_ids

        def run(
            parameters: PyTree, hidden: jax.Array, embedded: jax.Array
        ) -> tuple[jax.Array, RouterStats | None]:
            layer = nnx.merge(definition, parameters)
            x, router, _ = layer(hidden, embedded, context)
            return layer.final_norm(x), router

        for depth in range(1, self.depths + 1):
            own = jax.tree.map(lambda leaf, depth=depth: leaf[depth - 1], stacked)
            embedded = embed(tokens_later(tokens, depth, fill=0, zigzag=zigzag))
            hidden, router = context.execution.remat.wrap(run)(own, hidden, embedded)
            wanted = tokens_later(targets, depth, fill=-1, zigzag=zigzag)
            if segments is not None:
                same = tokens_later(segments, depth, fill=-1, zigzag=zigzag) == segments
                wanted = jnp.where(same, wanted, -1)
            yield Prediction(hidden, wanted, router)


def tokens_later(x: jax.Array, places: int, *, fill: int, zigzag: int = 1) -> jax.Array:
    """Return x (B, S) shifted by `places` tokens, so that each position has a later value.

    Args:
        x: One number per token.
        places: The shift in tokens.
        fill: The value after the last token.
        zigzag: Devices of the context axis whose zigzag order the tokens have.
    """
    plain = from_zigzag(x, zigzag) if zigzag > 1 else x
    moved = jnp.pad(plain[:, places:], ((0, 0), (0, places)), constant_values=fill)
    return to_zigzag(moved, zigzag) if zigzag > 1 else moved
