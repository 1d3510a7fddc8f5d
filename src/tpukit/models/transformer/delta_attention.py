"""Linear attention by the gated delta rule, between a short convolution and a gated norm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ...kernels.ops.rms_norm.reference import rms_norm
from ...parallel.sharding.activations import constrain
from .config import TransformerConfig
from .context import LayerContext
from .layer_config import LayerConfig
from .layers import Linear
from .mixing import DeltaInputs

FASTEST_DECAY = 16.0  # of a new head, per token before softplus; drawn between 0 and this


class ShortConvolution(nnx.Module):
    """The weights of a depthwise convolution over tokens, (channels, tokens)."""

    def __init__(self, channels: int, tokens: int, *, rngs: nnx.Rngs, param_dtype: str) -> None:
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform", in_axis=1, out_axis=0)
        self.kernel = nnx.Param(init(rngs.params(), (channels, tokens), jnp.dtype(param_dtype)))


class HeadNorm(nnx.Module):
    """The scale of a norm over each head's channels."""

    def __init__(self, width: int, *, param_dtype: str) -> None:
        self.scale = nnx.Param(jnp.ones((width,), param_dtype))


class DeltaAttention(nnx.Module):
    """The gated delta net of Qwen3-Next."""

    def __init__(self, config: TransformerConfig, layer: LayerConfig, *, rngs: nnx.Rngs) -> None:
        assert layer.delta is not None
        delta, d, dtype = layer.delta, config.d_model, config.param_dtype
        self.delta, self.eps = layer.delta, layer.norm_eps
        keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim

        def convolution(channels: int) -> ShortConvolution:
            return ShortConvolution(channels, delta.convolution, rngs=rngs, param_dtype=dtype)

        self.q_proj = Linear(d, keys, config, rngs=rngs)
        self.k_proj = Linear(d, keys, config, rngs=rngs)
        self.v_proj = Linear(d, values, config, rngs=rngs)
        self.q_conv, self.k_conv = convolution(keys), convolution(keys)
        self.v_conv = convolution(values)
        self.z_proj = Linear(d, values, config, rngs=rngs)
        self.a_proj = Linear(d, delta.value_heads, config, rngs=rngs)
        self.b_proj = Linear(d, delta.value_heads, config, rngs=rngs)
        fastest = jax.random.uniform(
            rngs.params(), (delta.value_heads,), minval=0.01, maxval=FASTEST_DECAY
        )
        self.a_log = nnx.Param(jnp.log(fastest).astype(dtype))
        self.dt_bias = nnx.Param(jnp.ones((delta.value_heads,), dtype))
        self.norm = HeadNorm(delta.value_dim, param_dtype=dtype)
        self.o_proj = Linear(values, d, config, rngs=rngs)

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, None]:
        """(B, S, d_model) -> (B, S, d_model); there are no keys for other layers."""
        delta = self.delta
        q = self._convolved("q", self.q_proj, self.q_conv, x, context)
        k = self._convolved("k", self.k_proj, self.k_conv, x, context)
        v = self._convolved("v", self.v_proj, self.v_conv, x, context)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        rate = self.a_proj(x).astype(wide) + self.dt_bias[...].astype(wide)
        decay = -jnp.exp(self.a_log[...].astype(wide)) * jax.nn.softplus(rate)
        inputs = DeltaInputs(
            self._heads(q, delta.key_dim),
            self._heads(k, delta.key_dim),
            self._heads(v, delta.value_dim),
            decay,
            jax.nn.sigmoid(self.b_proj(x)),
        )
        out = context.mixing.delta(inputs)
        out = constrain(checkpoint_name(out, "context"), "batch", "sequence", "heads", "head_dim")
        gate = self._heads(self.z_proj(x), delta.value_dim)
        normed = rms_norm(out, self.norm.scale[...], eps=self.eps)
        gated = (normed * jax.nn.silu(gate.astype(wide))).astype(x.dtype)
        return self.o_proj(gated.reshape(*x.shape[:2], -1)), None

    def _convolved(
        self,
        name: str,
        projection: Linear,
        convolution: ShortConvolution,
        x: jax.Array,
        context: LayerContext,
    ) -> jax.Array:
        names = {"q": "query_proj", "k": "key_proj", "v": "value_proj"}
        projected = checkpoint_name(projection(x), names[name])
        weight = convolution.kernel[...].astype(projected.dtype)
        return context.mixing.convolve(name, projected, weight)

    def _heads(self, x: jax.Array, width: int) -> jax.Array:
        heads = x.reshape(*x.shape[:2], -1, width)
        return constrain(heads, "batch", "sequence", "heads", "head_dim")
