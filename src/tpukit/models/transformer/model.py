"""The reference decoder-only transformer: dense or MoE, layers stacked and scanned."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ...errors import TPUModelError
from ...parallel.experts.routing import RouterStats
from ...parallel.sharding.activations import constrain
from ..execution import Execution
from .config import TransformerConfig
from .decoder import DecoderLayer, LayerContext
from .layer_stack import round_in_use, run_layers
from .layers import Embedding, Linear, Norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TransformerOutput:
    """Logits (B, S, V), and what the routers did (None for a dense model)."""

    logits: jax.Array
    router: RouterStats | None


class Transformer(nnx.Module):
    """A decoder-only language model.

    `layers` is one `DecoderLayer` whose parameters have a leading axis of `n_layers`.
    `execution` says how it runs and can be replaced at any time.

    Example:
        >>> model = Transformer(get_preset("tiny"), rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((1, 8), jnp.int32)).shape
        (1, 8, 256)
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        rngs: nnx.Rngs,
        execution: Execution | None = None,
    ) -> None:
        self.config = config
        self.execution = execution or Execution()
        self.embed = Embedding(config.vocab_size, config.d_model, config, rngs=rngs)
        self.position_embed = (
            Embedding(config.max_seq_len, config.d_model, config, rngs=rngs)
            if config.positions == "learned"
            else None
        )

        @nnx.split_rngs(splits=config.n_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, rngs=rngs)

        self.layers = stack(rngs)
        self.final_norm = Norm(config.d_model, config)
        self.lm_head = (
            None
            if config.tied_embeddings
            else Linear(config.d_model, config.vocab_size, config, rngs=rngs, use_bias=False)
        )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Logits (B, S, V) for tokens (B, S)."""
        return self.forward(tokens, positions=positions, segment_ids=segment_ids).logits

    def forward(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> TransformerOutput:
        """Logits and router statistics.

        Args:
            tokens: (B, S) token numbers.
            positions: (B, S) index of each token in its document; 0, 1, 2 … by default.
            segment_ids: (B, S) number of the packed document a token belongs to.
        """
        x, router = self.hidden(tokens, positions=positions, segment_ids=segment_ids)
        return TransformerOutput(self.unembed(x), router)

    def hidden(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterStats | None]:
        """The last layer's output (B, S, d_model), and router statistics."""
        x = self.embed_tokens(tokens, positions)
        context = self.context(tokens.shape, positions=positions, segment_ids=segment_ids)
        return self.run_stack(nnx.state(self.layers), x, context)

    def embed_tokens(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """The input of the first layer, (B, S, d_model)."""
        length = tokens.shape[1]
        if length > self.config.max_seq_len:
            raise TPUModelError(
                f"the sequence has {length} tokens and '{self.config.name}' takes at most "
                f"{self.config.max_seq_len}; shorten it or raise max_seq_len."
            )
        x = self.embed(tokens)
        if self.config.scale_embeddings:
            x = x * jnp.asarray(self.config.d_model**0.5, x.dtype)
        if self.position_embed is not None:
            where = jnp.arange(length)[None] if positions is None else positions
            x = x + self.position_embed(where)
        return constrain(x, "batch", "sequence", "embed")

    def context(
        self,
        shape: tuple[int, ...],
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> LayerContext:
        """What the layers of one forward pass over tokens of `shape` share."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(shape[1])[None], (shape[0], shape[1]))
        return LayerContext(positions, segment_ids, self.execution)

    def run_stack(
        self, stacked: Any, x: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, RouterStats | None]:
        """Send `x` through the layers whose parameters are `stacked`: all of them, or a stage's."""
        definition = nnx.graphdef(self.layers)

        def one_layer(parameters: Any, x: jax.Array, index: int) -> Any:
            layer = nnx.merge(definition, parameters)
            return layer(x, self.config.window_of_layer(index), context)

        scan = context.execution.scan_layers
        layer, weights = one_layer, stacked
        if scan and not self.config.wide_gradients:
            layer, weights = round_in_use(one_layer, stacked, jnp.dtype(self.config.dtype))
        return run_layers(
            layer,
            weights,
            x,
            period=self.config.layer_period,
            remat=context.execution.remat,
            scan=scan,
        )

    def unembed(self, x: jax.Array) -> jax.Array:
        """Logits of the last layer's output."""
        return constrain(self.final_norm(x) @ self.head(), "batch", "sequence", "vocab")

    def head(self) -> jax.Array:
        """The matrix (d_model, V) that normed activations are multiplied with."""
        return self.embed.head() if self.lm_head is None else self.lm_head.matrix()
