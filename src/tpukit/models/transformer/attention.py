"""Grouped-query attention of a decoder layer, with the options of published models."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ...kernels.ops.rope.tables import tables_at
from ...kernels.ops.rope_apart.api import rope_apart
from ...parallel.sharding.activations import constrain
from .config import TransformerConfig
from .context import LayerContext
from .layer_config import LayerConfig
from .layers import (
    Linear,
    Norm,
    apply_rope,
    layer_frequencies,
    rope_table_scale,
    side_by_side,
    unscaled_norm,
)
from .mixing import SharedKeys


def uses(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """`x` for so many products whose gradients are added up in an order that XLA fuses on a GPU.

    cuBLAS adds to what is there, and XLA gives a sum to its first operand's product if that adds
    nothing yet: the last product must stand first.
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
        """(B, S, d_model) -> (B, S, d_model), and the keys for layers that share them."""
        c = self.layer
        gpu = context.execution.gpu_kernels
        if gpu and self._is_plain():
            for_both, for_v = uses(x, 2)
            q, keys = self._queries_and_keys_in_one(for_both, context)
            v = self._values(for_v, keys)
        elif context.execution.one_product and self.k_proj is not None and self.v_proj is not None:
            q, keys, v = self._all_in_one(self.k_proj, self.v_proj, x)
            q = self._rotated(self._normed(q, self.q_norm), context)
            v = self._normed_values(v)
            keys = self._rotated(self._normed(keys, self.k_norm), context)
        else:
            for_q, for_k, for_v = uses(x, 3) if gpu else (x, x, x)
            q = self._rotated(self._normed(self._heads(self.q_proj, for_q), self.q_norm), context)
            if self.k_proj is None:
                keys, v = context.shared[str(c.shares_keys_of)]
            else:
                keys = self._heads(self.k_proj, for_k)
                v = self._values(for_v, keys)
                keys = self._rotated(self._normed(keys, self.k_norm), context)
        q = self._heated(q, context)
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
        """Queries, keys and values of one product."""
        c = self.layer
        joined = side_by_side((self.q_proj, keys, values), x)
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

    def _heated(self, q: jax.Array, context: LayerContext) -> jax.Array:
        """Queries that grow with their position, where the layer asks for it."""
        c = self.layer
        if not c.temperature_scale:
            return q
        whole = jnp.floor((context.positions + 1.0) / c.temperature_floor)
        growth = 1.0 + c.temperature_scale * jnp.log1p(whole)
        return (q * growth[..., None, None]).astype(q.dtype)

    def _is_plain(self) -> bool:
        c = self.layer
        turned = (
            c.positions == "rope" and c.rope_share == 1 and rope_table_scale(c.rope_scaling) == 1
        )
        return turned and not (c.qk_norm or self.k_proj is None or c.keys_as_values)

    def _queries_and_keys_in_one(
        self, x: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Of one product, which is wider than theirs and so runs at a higher rate on a GPU."""
        assert self.k_proj is not None
        tables = tables_at(context.positions, self._frequencies(context))
        joined = side_by_side((self.q_proj, self.k_proj), x)
        return rope_apart(joined, *tables, heads=(self.layer.n_heads, self.layer.n_kv_heads))

    def _frequencies(self, context: LayerContext) -> np.ndarray:
        return layer_frequencies(self.layer, length=context.length)
