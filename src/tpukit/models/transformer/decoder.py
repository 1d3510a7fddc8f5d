"""One decoder layer: tokens are mixed, then each passes a feed-forward block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ...parallel.experts.routing import RouterStats
from ...parallel.sharding.activations import constrain
from .attention import SelfAttention
from .config import TransformerConfig
from .context import LayerContext
from .delta_attention import DeltaAttention
from .feed_forward import DenseMLP, MixtureOfExperts, activate
from .latent_attention import LatentSelfAttention
from .layer_config import LayerConfig
from .layers import Linear, Norm
from .mixing import SharedKeys


class LayerResult(NamedTuple):
    """The stream after a layer, what its router did, and keys that other layers may read."""

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
        # One of three, under the name its parameters are stored by.
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
        """The layer's output, its router's statistics and its keys."""
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
        # With one norm for both blocks, XLA is left to add what they give in one go.
        parallel = self.layer.parallel_block
        if not parallel:
            x, normed = self._normed(self.mlp_norm, x, attended, context)
        mixed, statistics = self._feed_forward(normed, x, context)
        if self.post_mlp_norm is not None:
            mixed = self.post_mlp_norm(mixed)
        mixed = checkpoint_name(mixed, "mlpwo")
        mixed = constrain(mixed, "batch", "sequence", "embed")
        out = x + attended + mixed if parallel else x + mixed
        out = self._with_own_embedding(out, context)
        if self.layer_scalar is not None:
            out = out * self.layer_scalar[...].astype(out.dtype)
        return LayerResult(constrain(out, "batch", "sequence", "embed"), statistics, keys)

    def _normed(
        self, norm: Norm | None, x: jax.Array, added: jax.Array | None, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """The stream with what was added, and what the next block reads of it."""
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

    def _with_own_embedding(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """The stream and the tokens' embedding for this layer, let in by a gate."""
        if self.per_layer_gate is None or context.per_layer is None:
            return x
        assert self.per_layer_proj is not None
        assert self.per_layer_norm is not None
        gate = activate(self.layer.activation, self.per_layer_gate(x))
        return x + self.per_layer_norm(self.per_layer_proj(gate * context.per_layer))
