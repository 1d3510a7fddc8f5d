"""An embedding of its own that every layer has for every token (Gemma 4 E2B and E4B)."""

import jax
import jax.numpy as jnp
from flax import nnx

from .config import TransformerConfig
from .layers import Embedding, Linear, Norm


class PerLayerEmbedding(nnx.Module):
    """What each layer is told of each token: a row of a table, and of the token's embedding."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.layers, self.width = config.n_layers, config.per_layer_width
        columns = self.layers * self.width
        self.embed = Embedding(config.vocab_size, columns, config, rngs=rngs)
        self.proj = Linear(config.d_model, columns, config, rngs=rngs)
        self.norm = Norm(self.width, config, param_dtype=config.param_dtype)

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """(layers, B, S, width) for tokens (B, S) whose embeddings are x (B, S, d_model)."""
        shape = (*tokens.shape, self.layers, self.width)
        known = self.embed(tokens).reshape(shape) * jnp.asarray(self.width**0.5, x.dtype)
        seen = self.proj(x) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        both = (self.norm(seen.reshape(shape)) + known) * jnp.asarray(2**-0.5, x.dtype)
        return jnp.moveaxis(both, 2, 0)
