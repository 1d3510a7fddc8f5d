"""The token mixers of a decoder layer: grouped-query, latent and linear (gated delta) attention."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ...kernels.ops.rms_norm.api import plain_rms_norm as rms_norm
from ...kernels.ops.rope import tables_at
from ...kernels.ops.rope_apart import rope_apart
from ...parallel.sharding.activations import constrain
from .config import TransformerConfig
from .layer_config import LayerConfig
from .layers import (
    Linear,
    Norm,
    apply_rope,
    joined_linear,
    layer_frequencies,
    rope_table_scale,
    unscaled_norm,
)
from .mixing import DeltaInputs, Latents, LayerContext, SharedKeys


def copies_for_matmuls(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Return `count` references to `x`, whose gradients are summed in an order XLA fuses on a GPU.

    cuBLAS can accumulate onto an existing array. XLA uses this for the matmul of a sum's first
    operand if that matmul does not accumulate yet, so the last gradient must come first.
    """

    @jax.custom_vjp
    def copies(x: jax.Array) -> tuple[jax.Array, ...]:
        return (x,) * count

    def forward(x: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        return copies(x), None

    def backward(_: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
        return (reduce(lambda total, gradient: gradient + total, gradients),)

    copies.defvjp(forward, backward)
    return copies(x)


class SelfAttention(nnx.Module):
    """Grouped-query causal self-attention."""

    def __init__(self, config: TransformerConfig, layer: LayerConfig, *, rngs: nnx.Rngs) -> None:
        c, d, dtype = layer, config.d_model, config.param_dtype
        self.layer = layer
        heads, keys = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        biased, own_keys = c.attention_bias is not None, c.shares_keys_of is None
        self.q_proj = Linear(d, heads, config, rngs=rngs, bias=biased)
        self.k_proj = Linear(d, keys, config, rngs=rngs, bias=biased) if own_keys else None
        self.v_proj = (
            Linear(d, keys, config, rngs=rngs, bias=biased)
            if own_keys and not c.keys_as_values
            else None
        )
        self.o_proj = Linear(heads, d, config, rngs=rngs, bias=c.attention_bias == "qkvo")
        self.g_proj = Linear(d, heads, config, rngs=rngs, bias=biased) if c.attention_gate else None
        learned = c.qk_norm in ("head", "across_heads")
        widths = (heads, keys) if c.qk_norm == "across_heads" else (c.head_dim, c.head_dim)
        self.q_norm = Norm(widths[0], c, param_dtype=dtype) if learned else None
        self.k_norm = Norm(widths[1], c, param_dtype=dtype) if learned and own_keys else None
        self.sinks = nnx.Param(jnp.zeros((c.n_heads,), dtype)) if c.attention_sinks else None

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, SharedKeys]:
        """Return the output (B, S, d_model), and the keys for layers that share them."""
        c = self.layer
        gpu = context.execution.gpu_kernels
        if gpu and self._is_plain():
            for_both, for_v = copies_for_matmuls(x, 2)
            q, keys = self._queries_and_keys_in_one(for_both, context)
            v = self._values(for_v, keys)
        elif (
            context.execution.joined_matmuls and self.k_proj is not None and self.v_proj is not None
        ):
            q, keys, v = self._all_in_one(self.k_proj, self.v_proj, x)
            q = self._rotated(self._normed(q, self.q_norm), context)
            v = self._normed_values(v)
            keys = self._rotated(self._normed(keys, self.k_norm), context)
        else:
            for_q, for_k, for_v = copies_for_matmuls(x, 3) if gpu else (x, x, x)
            q = self._rotated(self._normed(self._heads(self.q_proj, for_q), self.q_norm), context)
            if self.k_proj is None:
                keys, v = context.shared[str(c.shares_keys_of)]
            else:
                keys = self._heads(self.k_proj, for_k)
                v = self._values(for_v, keys)
                keys = self._rotated(self._normed(keys, self.k_norm), context)
        q = self._temperature_scaled(q, context)
        q = constrain(checkpoint_name(q, "query_proj"), "batch", "sequence", "heads", "head_dim")
        keys = checkpoint_name(keys, "key_proj")
        keys = constrain(keys, "batch", "sequence", "kv_heads", "head_dim")
        v = constrain(checkpoint_name(v, "value_proj"), "batch", "sequence", "kv_heads", "head_dim")
        out, kept = self._attend(q, SharedKeys(keys, v), context)
        out = constrain(checkpoint_name(out, "context"), "batch", "sequence", "heads", "head_dim")
        out = out.reshape(*x.shape[:2], c.n_heads * c.head_dim)
        if self.g_proj is not None:
            out = out * jax.nn.sigmoid(self.g_proj(x))
        return self.o_proj(out), kept

    def _attend(
        self, q: jax.Array, keys: SharedKeys, context: LayerContext
    ) -> tuple[jax.Array, SharedKeys]:
        wide = jnp.promote_types(q.dtype, jnp.float32)
        sinks = None if self.sinks is None else self.sinks[...].astype(wide)
        if self.k_proj is None:
            return context.mixing.attend_shared(self.layer, q, keys, sinks), keys
        return context.mixing.attend(self.layer, q, keys, sinks)

    def _heads(self, projection: Linear, x: jax.Array) -> jax.Array:
        y = projection(x)
        return y.reshape(*y.shape[:2], -1, self.layer.head_dim)

    def _normed(self, heads: jax.Array, norm: Norm | None) -> jax.Array:
        if norm is None:
            return heads
        if self.layer.qk_norm == "head":
            return norm(heads)
        return norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)

    def _values(self, x: jax.Array, keys: jax.Array) -> jax.Array:
        return self._normed_values(keys if self.v_proj is None else self._heads(self.v_proj, x))

    def _normed_values(self, v: jax.Array) -> jax.Array:
        return unscaled_norm(v, eps=self.layer.norm_eps) if self.layer.v_norm else v

    def _all_in_one(
        self, keys: Linear, values: Linear, x: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values from one matmul."""
        c = self.layer
        joined = joined_linear((self.q_proj, keys, values), x)
        heads = joined.reshape(*joined.shape[:2], -1, c.head_dim)
        last = c.n_heads + c.n_kv_heads
        return heads[:, :, : c.n_heads], heads[:, :, c.n_heads : last], heads[:, :, last:]

    def _rotated(self, heads: jax.Array, context: LayerContext) -> jax.Array:
        c = self.layer
        if c.positions == "rope":
            scale = rope_table_scale(c.rope_scaling)
            frequencies = self._frequencies(context)
            heads = apply_rope(heads, context.positions, frequencies, table_scale=scale)
        return unscaled_norm(heads, eps=c.norm_eps) if c.qk_norm == "after_rope" else heads

    def _temperature_scaled(self, q: jax.Array, context: LayerContext) -> jax.Array:
        """Return queries scaled by position, where the layer has a temperature scale."""
        c = self.layer
        if not c.temperature_scale:
            return q
        periods = jnp.floor((context.positions + 1.0) / c.temperature_floor)
        scale = 1.0 + c.temperature_scale * jnp.log1p(periods)
        return (q * scale[..., None, None]).astype(q.dtype)

    def _is_plain(self) -> bool:
        c = self.layer
        plain_rope = (
            c.positions == "rope" and c.rope_share == 1 and rope_table_scale(c.rope_scaling) == 1
        )
        return plain_rope and not (c.qk_norm or self.k_proj is None or c.keys_as_values)

    def _queries_and_keys_in_one(
        self, x: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Return rotated queries and keys from one wide matmul, which is faster on a GPU."""
        assert self.k_proj is not None
        tables = tables_at(context.positions, self._frequencies(context))
        joined = joined_linear((self.q_proj, self.k_proj), x)
        return rope_apart(joined, *tables, heads=(self.layer.n_heads, self.layer.n_kv_heads))

    def _frequencies(self, context: LayerContext) -> np.ndarray:
        return layer_frequencies(self.layer, length=context.length)


class LatentSelfAttention(nnx.Module):
    """Causal self-attention over latents (DeepSeek V2, V3, Kimi K2)."""

    def __init__(self, config: TransformerConfig, layer: LayerConfig, *, rngs: nnx.Rngs) -> None:
        assert layer.latent is not None
        latent, heads, d = layer.latent, layer.n_heads, config.d_model
        self.layer, self.latent = layer, layer.latent
        queries = heads * latent.qk_dim
        ranked = latent.q_rank > 0
        dtype = config.param_dtype
        self.q_proj = None if ranked else Linear(d, queries, config, rngs=rngs)
        self.q_a_proj = Linear(d, latent.q_rank, config, rngs=rngs) if ranked else None
        self.q_a_norm = Norm(latent.q_rank, layer, param_dtype=dtype) if ranked else None
        self.q_b_proj = Linear(latent.q_rank, queries, config, rngs=rngs) if ranked else None
        self.kv_a_proj = Linear(d, latent.kv_rank + latent.rope_dim, config, rngs=rngs)
        self.kv_a_norm = Norm(latent.kv_rank, layer, param_dtype=dtype)
        values = heads * (latent.nope_dim + latent.v_dim)
        self.kv_b_proj = Linear(latent.kv_rank, values, config, rngs=rngs)
        self.o_proj = Linear(heads * latent.v_dim, d, config, rngs=rngs)

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, None]:
        """Return the output (B, S, d_model); other layers cannot share its keys."""
        latent = self.latent
        q = self._queries(x).reshape(*x.shape[:2], self.layer.n_heads, latent.qk_dim)
        q = constrain(checkpoint_name(q, "query_proj"), "batch", "sequence", "heads", "head_dim")
        q_nope, q_rope = q[..., : latent.nope_dim], q[..., latent.nope_dim :]
        both = checkpoint_name(self.kv_a_proj(x), "key_proj")
        latents = Latents(
            self.kv_a_norm(both[..., : latent.kv_rank]),
            self._rotated(both[..., None, latent.kv_rank :], context)[:, :, 0],
        )
        rotated = self._rotated(q_rope, context)
        out = context.mixing.attend_latent(self.layer, (q_nope, rotated), latents, self)
        out = constrain(checkpoint_name(out, "context"), "batch", "sequence", "heads", "head_dim")
        return self.o_proj(out.reshape(*x.shape[:2], -1)), None

    def expand(self, latents: Latents) -> SharedKeys:
        """Return the keys and values of every head."""
        heads, nope = self.layer.n_heads, self.latent.nope_dim
        both = checkpoint_name(self.kv_b_proj(latents.latent), "value_proj")
        both = both.reshape(*both.shape[:2], heads, -1)
        both = constrain(both, "batch", "sequence", "heads", "head_dim")
        shape = (*both.shape[:3], self.latent.rope_dim)
        rope = jnp.broadcast_to(latents.rope_key[:, :, None], shape)
        return SharedKeys(jnp.concatenate([both[..., :nope], rope], axis=-1), both[..., nope:])

    def matrices(self) -> tuple[jax.Array, jax.Array]:
        """Return the matrices (kv_rank, H, nope_dim) and (kv_rank, H, v_dim)."""
        nope = self.latent.nope_dim
        both = self.kv_b_proj.matrix().reshape(self.latent.kv_rank, self.layer.n_heads, -1)
        return both[..., :nope], both[..., nope:]

    def _queries(self, x: jax.Array) -> jax.Array:
        if self.q_proj is not None:
            return self.q_proj(x)
        assert self.q_a_proj is not None
        assert self.q_a_norm is not None
        assert self.q_b_proj is not None
        return self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))

    def _rotated(self, heads: jax.Array, context: LayerContext) -> jax.Array:
        c = self.layer
        frequencies = layer_frequencies(c, length=context.length)
        scale = rope_table_scale(c.rope_scaling)
        return apply_rope(heads, context.positions, frequencies, table_scale=scale)


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
        """Return the output (B, S, d_model); it has no keys for other layers."""
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
