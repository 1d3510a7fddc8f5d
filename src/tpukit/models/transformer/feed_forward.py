"""The feed-forward block of a decoder layer: dense, experts, or both."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ...kernels.ops.gated_activation import gated_activation
from ...parallel.experts.feed_forward import Activation, ExpertBiases
from ...parallel.experts.layer import moe_ffn
from ...parallel.experts.routing import RouterStats
from ...parallel.sharding.activations import constrain
from ..matmul.matmul_format import experts_format
from .config import TransformerConfig
from .layer_config import LayerConfig
from .layers import Linear, Norm, joined_linear, unscaled_norm
from .mixing import LayerContext

# Our name of an activation -> the name in `parallel.experts`.
_EXPERT_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu_tanh",
    "relu": "relu",
    "clamped_swiglu": "clamped_swiglu",
}


def activate(name: str, x: jax.Array) -> jax.Array:
    """Return the activation called `name` of `x`."""
    return Activation(_EXPERT_ACTIVATIONS[name])(None, x)


class DenseMLP(nnx.Module):
    """Gated (SwiGLU-like) or plain two-matrix feed-forward block."""

    def __init__(
        self, config: TransformerConfig, layer: LayerConfig, width: int, *, rngs: nnx.Rngs
    ) -> None:
        c, d = layer, config.d_model
        self.activation = c.activation
        self.gate_proj = (
            Linear(d, width, config, rngs=rngs, bias=c.mlp_bias) if c.gated_mlp else None
        )
        self.up_proj = Linear(d, width, config, rngs=rngs, bias=c.mlp_bias)
        self.down_proj = Linear(width, d, config, rngs=rngs, bias=c.mlp_bias)

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """Return the output (B, S, d_model)."""
        if self.gate_proj is None:
            hidden = activate(self.activation, checkpoint_name(self.up_proj(x), "mlpwi_1"))
        elif context.execution.gpu_kernels and self.activation == "silu":
            both = joined_linear((self.gate_proj, self.up_proj), x)
            hidden = gated_activation(checkpoint_name(both, "mlpwi_0"))
        elif context.execution.joined_matmuls:
            both = joined_linear((self.gate_proj, self.up_proj), x)
            gate, up = jnp.split(both, 2, axis=-1)
            hidden = Activation(_EXPERT_ACTIVATIONS[self.activation])(gate, up)
        else:
            up = checkpoint_name(self.up_proj(x), "mlpwi_1")
            gate = checkpoint_name(self.gate_proj(x), "mlpwi_0")
            hidden = Activation(_EXPERT_ACTIVATIONS[self.activation])(gate, up)
        hidden = constrain(hidden, "batch", "sequence", "mlp")
        return self.down_proj(hidden)


class Experts(nnx.Module):
    """The weights of all experts of a layer, with a leading expert axis."""

    def __init__(self, config: TransformerConfig, layer: LayerConfig, *, rngs: nnx.Rngs) -> None:
        c, d, count = layer, config.d_model, layer.n_experts
        init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        dtype = jnp.dtype(config.param_dtype)
        self.matmul = config.matmul
        widen, narrow = (count, d, c.expert_d_ff), (count, c.expert_d_ff, d)
        self.gate_proj = nnx.Param(init(rngs.params(), widen, dtype))
        self.up_proj = nnx.Param(init(rngs.params(), widen, dtype))
        self.down_proj = nnx.Param(init(rngs.params(), narrow, dtype))

        def bias(width: int) -> nnx.Param[jax.Array] | None:
            return nnx.Param(jnp.zeros((count, width), dtype)) if c.expert_bias else None

        self.gate_bias, self.up_bias = bias(c.expert_d_ff), bias(c.expert_d_ff)
        self.down_bias = bias(d)

    def biases(self, dtype: jnp.dtype) -> ExpertBiases | None:
        """Return the biases of the three matrices, or None."""
        if self.gate_bias is None or self.up_bias is None or self.down_bias is None:
            return None
        found = (self.gate_bias, self.up_bias, self.down_bias)
        return ExpertBiases(*(bias[...].astype(dtype) for bias in found))


class Router(nnx.Module):
    """The weights of a router."""

    def __init__(self, config: TransformerConfig, layer: LayerConfig, *, rngs: nnx.Rngs) -> None:
        c, d, count = layer, config.d_model, layer.n_experts
        dtype = jnp.dtype(config.param_dtype)
        self.eps = c.norm_eps
        self.matmul = "dtype"  # routing depends on small differences, so it is never quantized
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (d, count), dtype))
        self.bias = nnx.Param(jnp.zeros((count,), dtype)) if c.router_bias else None
        self.choice_bias = nnx.Param(jnp.zeros((count,), dtype)) if c.router_choice_bias else None
        self.scale = nnx.Param(jnp.ones((d,), dtype)) if c.router_norm else None
        self.expert_scale = nnx.Param(jnp.ones((count,), dtype)) if c.router_norm else None

    def reads(self, stream: jax.Array) -> jax.Array | None:
        """Return the router's own input, or None where it reads the experts' input."""
        if self.scale is None:
            return None
        width = stream.shape[-1]
        normed = unscaled_norm(stream, eps=self.eps)
        return normed * (self.scale[...].astype(stream.dtype) * width**-0.5)


class MixtureOfExperts(nnx.Module):
    """A router that sends each token to its best `experts_per_token` gated MLPs.

    The output may include a shared expert for every token, or a dense MLP beside the experts.
    """

    def __init__(self, config: TransformerConfig, layer: LayerConfig, *, rngs: nnx.Rngs) -> None:
        c, d = layer, config.d_model
        self.layer, self.dtype = layer, jnp.dtype(config.dtype)
        self.float8_bound = config.float8_bound
        self.router = Router(config, c, rngs=rngs)
        self.experts = Experts(config, c, rngs=rngs)
        self.shared = DenseMLP(config, c, c.shared_d_ff, rngs=rngs) if c.shared_d_ff else None
        self.shared_gate = Linear(d, 1, config, rngs=rngs) if c.shared_gate else None
        beside = c.dense_beside_experts
        self.dense = DenseMLP(config, c, c.d_ff, rngs=rngs) if beside else None

        def norm() -> Norm | None:
            return Norm(d, c, param_dtype=config.param_dtype) if beside else None

        self.dense_norm, self.experts_input_norm, self.experts_norm = norm(), norm(), norm()

    def __call__(
        self, x: jax.Array, stream: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, RouterStats]:
        """Return the output (B, S, d_model) and router statistics.

        Args:
            x: The normed residual stream.
            stream: The residual stream, which some routers read.
            context: The context that all layers share.
        """
        for_experts = x if self.experts_input_norm is None else self.experts_input_norm(stream)
        out, statistics = self._through_experts(for_experts, stream, context)
        if self.experts_norm is not None:
            out = self.experts_norm(out)
        if self.dense is not None and self.dense_norm is not None:
            out = self.dense_norm(self.dense(x, context)) + out
        if self.shared is not None:
            shared = self.shared(x, context)
            if self.shared_gate is not None:
                shared = shared * jax.nn.sigmoid(self.shared_gate(x))
            out = out + shared
        return out, statistics

    def _through_experts(
        self, x: jax.Array, stream: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, RouterStats]:
        c, router, experts = self.layer, self.router, self.experts

        def value(parameter: nnx.Param[jax.Array] | None) -> jax.Array | None:
            return None if parameter is None else parameter[...]

        return moe_ffn(
            x,
            router.kernel[...],
            experts.gate_proj[...].astype(self.dtype),
            experts.up_proj[...].astype(self.dtype),
            experts.down_proj[...].astype(self.dtype),
            k=c.experts_per_token,
            routing=c.routing,
            capacity_factor=c.capacity_factor,
            activation=_EXPERT_ACTIVATIONS[c.activation],
            **experts_format(experts.matmul, self.float8_bound),
            normalize=c.router_normalize,
            score=c.router_score,
            router_x=router.reads(stream),
            logit_bias=value(router.bias),
            router_bias=value(router.choice_bias),
            weight_scale=c.router_scale,
            expert_scale=value(router.expert_scale),
            expert_groups=c.router_groups,
            kept_groups=c.router_groups_kept,
            group_top=c.router_group_top,
            weigh_inputs=c.weigh_inputs,
            biases=experts.biases(self.dtype),
            mesh=context.execution.expert_mesh,
            axis=context.execution.expert_axis,
            x_spec=context.execution.expert_tokens,
        )
