"""One decoder layer: attention, then a dense or mixture-of-experts feed-forward block."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ...kernels.ops.gated_activation.api import gated_activation
from ...kernels.ops.rope.tables import tables_at
from ...kernels.ops.rope_apart.api import rope_apart
from ...parallel.experts.layer import moe_ffn
from ...parallel.experts.routing import RouterStats
from ...parallel.sharding.activations import constrain
from ..attention.choice import get_attention
from ..execution import Execution
from .config import TransformerConfig
from .layers import Linear, Norm, apply_rope, rope_frequencies, side_by_side

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
}
_EXPERT_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_tanh", "relu": "relu"}


@dataclass(frozen=True)
class LayerContext:
    """What every layer of one forward pass shares."""

    positions: jax.Array  # (B, S)
    segment_ids: jax.Array | None  # (B, S)
    execution: Execution


def _uses(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
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

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        c = config
        self.config = config
        self.q_proj = Linear(c.d_model, c.n_heads * c.head_dim, c, rngs=rngs)
        self.k_proj = Linear(c.d_model, c.n_kv_heads * c.head_dim, c, rngs=rngs)
        self.v_proj = Linear(c.d_model, c.n_kv_heads * c.head_dim, c, rngs=rngs)
        self.o_proj = Linear(c.n_heads * c.head_dim, c.d_model, c, rngs=rngs)
        self.q_norm = Norm(c.head_dim, c) if c.qk_norm else None
        self.k_norm = Norm(c.head_dim, c) if c.qk_norm else None

    def __call__(self, x: jax.Array, window: int | None, context: LayerContext) -> jax.Array:
        """(B, S, d_model) -> (B, S, d_model); `window` is this layer's own."""
        c = self.config
        batch, length, _ = x.shape
        if context.execution.gpu_kernels and c.positions == "rope" and self.q_norm is None:
            for_both, for_v = _uses(x, 2)
            q, k = self._queries_and_keys_in_one(for_both, window, context)
        else:
            for_q, for_k, for_v = _uses(x, 3) if context.execution.gpu_kernels else (x, x, x)
            q, k = self._queries_and_keys(for_q, for_k, window, context)
        v = self.v_proj(for_v).reshape(batch, length, c.n_kv_heads, c.head_dim)
        q = constrain(checkpoint_name(q, "query_proj"), "batch", "sequence", "heads", "head_dim")
        k = constrain(checkpoint_name(k, "key_proj"), "batch", "sequence", "kv_heads", "head_dim")
        v = constrain(checkpoint_name(v, "value_proj"), "batch", "sequence", "kv_heads", "head_dim")
        attend = get_attention(context.execution.attention)
        out = attend(q, k, v, window=window, segment_ids=context.segment_ids)
        out = constrain(checkpoint_name(out, "context"), "batch", "sequence", "heads", "head_dim")
        return self.o_proj(out.reshape(batch, length, c.n_heads * c.head_dim))

    def _queries_and_keys(
        self, for_q: jax.Array, for_k: jax.Array, window: int | None, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        c = self.config
        q = self.q_proj(for_q).reshape(*for_q.shape[:2], c.n_heads, c.head_dim)
        k = self.k_proj(for_k).reshape(*for_k.shape[:2], c.n_kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.positions != "rope":
            return q, k
        frequencies = self._frequencies(window)
        return (
            apply_rope(q, context.positions, frequencies),
            apply_rope(k, context.positions, frequencies),
        )

    def _queries_and_keys_in_one(
        self, x: jax.Array, window: int | None, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Of one product, which is wider than theirs and so runs at a higher rate on a GPU."""
        tables = tables_at(context.positions, self._frequencies(window))
        joined = side_by_side((self.q_proj, self.k_proj), x)
        return rope_apart(joined, *tables, heads=(self.config.n_heads, self.config.n_kv_heads))

    def _frequencies(self, window: int | None) -> np.ndarray:
        c = self.config
        if window is not None and c.local_rope_theta is not None:
            return rope_frequencies(c.head_dim, theta=c.local_rope_theta)
        return rope_frequencies(c.head_dim, theta=c.rope_theta, scaling=c.rope_scaling)


class DenseMLP(nnx.Module):
    """Gated (SwiGLU-like) or plain two-matrix feed-forward block."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        c = config
        self.activation = c.activation
        self.gate_proj = Linear(c.d_model, c.d_ff, c, rngs=rngs) if c.gated_mlp else None
        self.up_proj = Linear(c.d_model, c.d_ff, c, rngs=rngs)
        self.down_proj = Linear(c.d_ff, c.d_model, c, rngs=rngs)

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, None]:
        """(B, S, d_model) -> (B, S, d_model), and no statistics."""
        act = _ACTIVATIONS[self.activation]
        if self.gate_proj is None:
            hidden = act(checkpoint_name(self.up_proj(x), "mlpwi_1"))
        elif context.execution.gpu_kernels and self.activation == "silu":
            both = side_by_side((self.gate_proj, self.up_proj), x)
            hidden = gated_activation(checkpoint_name(both, "mlpwi_0"))
        else:
            up = checkpoint_name(self.up_proj(x), "mlpwi_1")
            hidden = act(checkpoint_name(self.gate_proj(x), "mlpwi_0")) * up
        hidden = constrain(hidden, "batch", "sequence", "mlp")
        return self.down_proj(hidden), None


class Experts(nnx.Module):
    """The weights of all experts of a layer, with a leading expert axis."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        c = config
        init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        dtype = jnp.dtype(c.param_dtype)
        widen, narrow = (c.n_experts, c.d_model, c.d_ff), (c.n_experts, c.d_ff, c.d_model)
        self.gate_proj = nnx.Param(init(rngs.params(), widen, dtype))
        self.up_proj = nnx.Param(init(rngs.params(), widen, dtype))
        self.down_proj = nnx.Param(init(rngs.params(), narrow, dtype))


class MixtureOfExperts(nnx.Module):
    """A router sends each token through its best `experts_per_token` gated MLPs."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.router = Linear(config.d_model, config.n_experts, config, rngs=rngs, use_bias=False)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, RouterStats]:
        """(B, S, d_model) -> (B, S, d_model), and what the router did."""
        c = self.config
        dtype = jnp.dtype(c.dtype)
        return moe_ffn(
            x,
            self.router.kernel[...],
            self.experts.gate_proj[...].astype(dtype),
            self.experts.up_proj[...].astype(dtype),
            self.experts.down_proj[...].astype(dtype),
            k=c.experts_per_token,
            routing=c.routing,
            capacity_factor=c.capacity_factor,
            activation=_EXPERT_ACTIVATIONS[c.activation],
            mesh=context.execution.expert_mesh,
            axis=context.execution.expert_axis,
            x_spec=context.execution.expert_tokens,
        )


class DecoderLayer(nnx.Module):
    """Pre-norm residual layer; `parallel_block` reads attention and MLP from the same norm."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        c = config
        self.config = config
        self.input_norm = Norm(c.d_model, c)
        self.self_attention = SelfAttention(c, rngs=rngs)
        self.post_attention_norm = Norm(c.d_model, c) if c.post_norms else None
        self.mlp_norm = None if c.parallel_block else Norm(c.d_model, c)
        self.mlp = MixtureOfExperts(c, rngs=rngs) if c.n_experts else DenseMLP(c, rngs=rngs)
        self.post_mlp_norm = Norm(c.d_model, c) if c.post_norms else None

    def __call__(
        self, x: jax.Array, window: int | None, context: LayerContext
    ) -> tuple[jax.Array, RouterStats | None]:
        """The layer's output and its router's statistics."""
        x = checkpoint_name(x, "decoder_layer_input")
        x = constrain(x, "batch", "sequence", "embed")
        kernels = context.execution.gpu_kernels
        x, normed = self.input_norm.after(x, None, gpu_kernels=kernels)
        normed = constrain(normed, "batch", "sequence", "embed")
        attended = self.self_attention(normed, window, context)
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        attended = checkpoint_name(attended, "out_proj")
        attended = constrain(attended, "batch", "sequence", "embed")
        if self.mlp_norm is not None:
            x, normed = self.mlp_norm.after(x, attended, gpu_kernels=kernels)
            normed = constrain(normed, "batch", "sequence", "embed")
        mixed, statistics = self.mlp(normed, context)
        if self.post_mlp_norm is not None:
            mixed = self.post_mlp_norm(mixed)
        mixed = checkpoint_name(mixed, "mlpwo")
        mixed = constrain(mixed, "batch", "sequence", "embed")
        out = x + mixed if self.mlp_norm is not None else x + attended + mixed
        return constrain(out, "batch", "sequence", "embed"), statistics
