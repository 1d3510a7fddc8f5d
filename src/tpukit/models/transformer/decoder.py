"""One decoder layer: a token mixer and a feed-forward block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ...parallel.experts.routing import RouterStats
from ...parallel.sharding.activations import constrain
from .attention import DeltaAttention, LatentSelfAttention, SelfAttention
from .config import TransformerConfig
from .feed_forward import DenseMLP, MixtureOfExperts, activate
from .layer_config import LayerConfig
from .layers import Linear, Norm
from .mixing import LayerContext, SharedKeys


class LayerResult(NamedTuple):
    """The residual stream after a layer, its router statistics, and keys for other layers."""

    x: jax.Array
    router: RouterStats | None
    keys: SharedKeys | None


class DecoderLayer(nnx.Module):
    """A residual layer; `parallel_block` reads attention and MLP from the same norm."""

    def __init__(self, config: TransformerConfig, layer: LayerConfig, *, rngs: nnx.Rngs) -> None:
        c, d = layer, config.d_model
        self.layer = layer

        def norm(wanted: bool) -> Norm | None:
            return Norm(d, c, param_dtype=config.param_dtype) if wanted else None

        self.input_norm = norm(c.pre_norms)
        # One of three mixers, under the name of its parameters.
        self.self_attention = (
            SelfAttention(config, c, rngs=rngs)
            if c.mixer == "attention"
            else LatentSelfAttention(config, c, rngs=rngs)
            if c.mixer == "latent"
            else None
        )
        self.delta_attention = DeltaAttention(config, c, rngs=rngs) if c.mixer == "delta" else None
        self.post_attention_norm = norm(c.post_norms)
        self.mlp_norm = norm(c.pre_norms and not c.parallel_block)
        self.mlp = (
            MixtureOfExperts(config, c, rngs=rngs)
            if c.n_experts
            else DenseMLP(config, c, c.d_ff, rngs=rngs)
        )
        self.post_mlp_norm = norm(c.post_norms)
        width = c.per_layer_width
        self.per_layer_gate = Linear(d, width, config, rngs=rngs) if width else None
        self.per_layer_proj = Linear(width, d, config, rngs=rngs) if width else None
        self.per_layer_norm = norm(width > 0)
        self.layer_scalar = (
            nnx.Param(jnp.ones((1,), config.param_dtype)) if c.layer_scalar else None
        )

    def __call__(self, x: jax.Array, context: LayerContext) -> LayerResult:
        """Return the layer's output, its router's statistics and its keys."""
        x = checkpoint_name(x, "decoder_layer_input")
        x = constrain(x, "batch", "sequence", "embed")
        x, normed = self._normed(self.input_norm, x, None, context)
        mixer = self.self_attention or self.delta_attention
        assert mixer is not None
        attended, keys = mixer(normed, context)
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        attended = checkpoint_name(attended, "out_proj")
        attended = constrain(attended, "batch", "sequence", "embed")
        # With one norm for both blocks, XLA adds both outputs at once.
        parallel = self.layer.parallel_block
        if not parallel:
            x, normed = self._normed(self.mlp_norm, x, attended, context)
        mixed, statistics = self._feed_forward(normed, x, context)
        if self.post_mlp_norm is not None:
            mixed = self.post_mlp_norm(mixed)
        mixed = checkpoint_name(mixed, "mlpwo")
        mixed = constrain(mixed, "batch", "sequence", "embed")
        out = x + attended + mixed if parallel else x + mixed
        out = self._add_layer_embedding(out, context)
        if self.layer_scalar is not None:
            out = out * self.layer_scalar[...].astype(out.dtype)
        return LayerResult(constrain(out, "batch", "sequence", "embed"), statistics, keys)

    def _normed(
        self, norm: Norm | None, x: jax.Array, added: jax.Array | None, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Return the residual stream with `added`, and its norm for the next block."""
        if norm is None:
            x = x if added is None else x + added
            return x, x
        x, normed = norm.after(x, added, gpu_kernels=context.execution.gpu_kernels)
        return x, constrain(normed, "batch", "sequence", "embed")

    def _feed_forward(
        self, normed: jax.Array, stream: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, RouterStats | None]:
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp(normed, stream, context)
        return self.mlp(normed, context), None

    def _add_layer_embedding(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """Return the residual stream with the gated per-layer embedding of the tokens."""
        if self.per_layer_gate is None or context.per_layer is None:
            return x
        assert self.per_layer_proj is not None
        assert self.per_layer_norm is not None
        gate = activate(self.layer.activation, self.per_layer_gate(x))
        return x + self.per_layer_norm(self.per_layer_proj(gate * context.per_layer))
