"""Multi-token prediction: further layers that learn which tokens come after the next one.

As DeepSeek-V3 does it: depth k reads what the depth before it made of a token, and the token k
places later, and predicts the one after that. The embedding and the unembedding are the model's
own. Only training runs these layers; generation does without.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ...parallel.experts.routing import RouterStats
from ...parallel.ring.order import from_zigzag, to_zigzag
from .config import TransformerConfig
from .context import LayerContext
from .decoder import DecoderLayer, LayerResult
from .layers import Linear, Norm


class PredictionLayer(nnx.Module):
    """One depth: a projection of two normed vectors, then a layer like the decoder's last."""

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
        """What the decoder's layer makes of both; `final_norm` is left to the caller."""
        both = jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        return self.block(self.proj(both), context)


class Prediction(NamedTuple):
    """What one depth predicts, and what it should.

    Attributes:
        normed: (B, S, d_model) for the unembedding.
        targets: (B, S); negative where a sequence or document ends before.
        router: Statistics, where the layer has experts.
    """

    normed: jax.Array
    targets: jax.Array
    router: RouterStats | None


class PredictionLayers(nnx.Module):
    """All depths, their parameters stacked as the decoder's are."""

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
        """What each depth predicts.

        Args:
            hidden: (B, S, d_model) the decoder's last layer, normed, which is what servers of
                published weights give the first depth.
            tokens: (B, S) the inputs.
            targets: (B, S) the token after each.
            context: What the layers of this pass share.
            segment_ids: (B, S) number of the packed document a token belongs to.
            embed: The model's embedding of tokens.
        """
        definition, stacked = nnx.split(self.layers)
        zigzag, segments = context.execution.zigzag, segment_ids

        def run(
            parameters: Any, hidden: jax.Array, embedded: jax.Array
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
    """(B, S) so that each place holds what is `places` tokens later; `fill` past the end.

    Args:
        x: One number a token.
        places: How many tokens later.
        fill: What follows the last one.
        zigzag: Devices of a context axis in whose ring order the tokens are.
    """
    plain = from_zigzag(x, zigzag) if zigzag > 1 else x
    moved = jnp.pad(plain[:, places:], ((0, 0), (0, places)), constant_values=fill)
    return to_zigzag(moved, zigzag) if zigzag > 1 else moved
