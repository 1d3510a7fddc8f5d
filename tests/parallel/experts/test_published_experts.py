"""Experts of published models: values and gradients of `transformers`, with the same weights."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    Qwen2MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from tpukit.parallel.experts.feed_forward import ExpertBiases
from tpukit.parallel.experts.layer import moe_ffn, place_experts

E, D, F = 8, 8, 16
AXES = ("fsdp", "expert", "tensor")


@dataclass
class Published:
    """A layer of `transformers`, and the same by `moe_ffn`: its arguments from parameters.

    Experts that are shared by all tokens are no part of `moe_ffn`: theirs are made zero.
    """

    module: nn.Module
    forward: Callable[[torch.Tensor], torch.Tensor]
    arguments: Callable[[dict[str, jax.Array], jax.Array], tuple[tuple, dict]]  # parameters, x
    k: int
    options: dict = field(default_factory=dict)

    def parameters(self):
        return {name: jnp.asarray(p.detach().numpy()) for name, p in self.module.named_parameters()}

    def ours(self, parameters, x, **how):
        arrays, keywords = self.arguments(parameters, x)
        return moe_ffn(*arrays, k=self.k, **keywords, **self.options, **how)


def transposed(parameters, x, router="gate.weight"):
    """Expert weights as most have them: gate and up in one array, all transposed."""
    gate, up = jnp.split(parameters["experts.gate_up_proj"], 2, axis=1)
    weights = (gate, up, parameters["experts.down_proj"])
    return x, parameters[router].T, *(weight.swapaxes(1, 2) for weight in weights)


def gpt_oss():
    config = GptOssConfig(
        hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=3
    )
    module = GptOssMLP(config)

    def arguments(p, x):
        gate_up, bias = p["experts.gate_up_proj"], p["experts.gate_up_proj_bias"]
        down, down_bias = p["experts.down_proj"], p["experts.down_proj_bias"]
        biases = ExpertBiases(bias[:, ::2], bias[:, 1::2], down_bias)
        arrays = (x, p["router.weight"].T, gate_up[..., ::2], gate_up[..., 1::2], down)
        return arrays, {"logit_bias": p["router.bias"], "biases": biases}

    options = {"activation": "clamped_swiglu"}
    return Published(module, lambda x: module(x)[0], arguments, 3, options)


def deepseek_v3():
    config = DeepseekV3Config(
        hidden_size=D, moe_intermediate_size=F, n_routed_experts=E, num_experts_per_tok=3,
        n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    module = DeepseekV3MoE(config)
    bias = module.gate.e_score_correction_bias
    bias.copy_(torch.randn(E, generator=torch.Generator().manual_seed(1)))

    def arguments(p, x):
        return transposed(p, x), {"router_bias": jnp.asarray(bias.numpy())}

    options = {"score": "sigmoid", "weight_scale": 2.5, "expert_groups": 4, "kept_groups": 2}
    return Published(module, module, arguments, 3, options)


def deepseek_v2(*, grouped=True):
    method = "group_limited_greedy" if grouped else "greedy"
    config = DeepseekV2Config(
        hidden_size=D, moe_intermediate_size=F, n_routed_experts=E, num_experts_per_tok=3,
        n_group=4, topk_group=2, topk_method=method, routed_scaling_factor=16.0,
        num_attention_heads=2,  # 8 are not a multiple of its 32
    )  # fmt: skip
    module = DeepseekV2Moe(config)
    groups = {"expert_groups": 4, "kept_groups": 2, "group_top": 1} if grouped else {}
    options = {"normalize": False, "weight_scale": 16.0, **groups}
    return Published(module, module, lambda p, x: (transposed(p, x), {}), 3, options)


def llama4():
    config = Llama4TextConfig(
        hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=1
    )
    module = Llama4TextMoe(config)

    def arguments(p, x):
        gate, up = jnp.split(p["experts.gate_up_proj"], 2, axis=-1)
        return (x, p["router.weight"].T, gate, up, p["experts.down_proj"]), {}

    options = {"score": "sigmoid", "normalize": False, "weigh_inputs": True}
    return Published(module, lambda x: module(x)[0].reshape(x.shape), arguments, 1, options)


class Gemma4Branch(nn.Module):
    """A Gemma 4 layer's expert branch, but for the norm that experts have and the router not."""

    def __init__(self, config):
        super().__init__()
        self.router, self.experts = Gemma4TextRouter(config), Gemma4TextExperts(config)
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        rows = x.reshape(-1, D)
        _, weights, chosen = self.router(rows)
        return self.experts(rows * self.scale, chosen, weights).reshape(x.shape)


def gemma4():
    config = Gemma4TextConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=E, top_k_experts=3,
        enable_moe_block=True,
    )  # fmt: skip
    module = Gemma4Branch(config)

    def arguments(p, x):
        rms = jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        router_x = x * rms * p["router.scale"] * D**-0.5
        return transposed(p, x * p["scale"], router="router.proj.weight"), {
            "router_x": router_x,
            "expert_scale": p["router.per_expert_scale"],
        }

    return Published(module, module, arguments, 3, {"activation": "gelu_tanh"})


def qwen2_moe(*, norm_topk_prob):
    config = Qwen2MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=3,
        norm_topk_prob=norm_topk_prob,
    )  # fmt: skip
    module = Qwen2MoeSparseMoeBlock(config)
    options = {"normalize": norm_topk_prob}
    return Published(module, module, lambda p, x: (transposed(p, x), {}), 3, options)


LAYERS = {
    "GptOssMLP": gpt_oss,
    "DeepseekV3MoE": deepseek_v3,
    "DeepseekV2Moe": deepseek_v2,
    "DeepseekV2Moe-greedy": functools.partial(deepseek_v2, grouped=False),
    "Llama4TextMoe": llama4,
    "Gemma4TextExperts": gemma4,
    "Qwen2MoeSparseMoeBlock": functools.partial(qwen2_moe, norm_topk_prob=False),
    "Qwen2MoeSparseMoeBlock-norm_topk_prob": functools.partial(qwen2_moe, norm_topk_prob=True),
}
X, COTANGENT = np.random.default_rng(0).normal(size=(2, 8, 4, D)).astype(np.float32)


@pytest.fixture(scope="module", params=LAYERS, ids=list(LAYERS))
def published(request):
    """A layer of random weights, and what `transformers` makes of it: y, dx, every gradient."""
    generator = torch.Generator().manual_seed(0)
    layer = LAYERS[request.param]()
    with torch.no_grad():
        for name, parameter in layer.module.named_parameters():
            # Products large enough that the clamps of GPT-OSS cut some of them off.
            noise = torch.randn(parameter.shape, generator=generator)
            noise = 1 + 0.3 * noise if "scale" in name else noise
            parameter.copy_(torch.zeros_like(noise) if "shared_expert" in name else noise)
    x = torch.tensor(X, requires_grad=True)
    y = layer.forward(x)
    (y * torch.tensor(COTANGENT)).sum().backward()
    parameters = dict(layer.module.named_parameters())
    gradients = {
        name: parameter.grad.numpy()
        for name, parameter in parameters.items()
        if "shared_expert" not in name
    }
    return layer, y.detach().numpy(), x.grad.numpy(), gradients


def whole_mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), AXES)


def close(ours, theirs, name):
    """To 1e-5 of the largest number: sums of float32 in another order differ by that much."""
    scale = max(1.0, np.abs(theirs).max())
    np.testing.assert_allclose(ours / scale, theirs / scale, atol=1e-5, err_msg=name)


def assert_equal_to_transformers(published, **how):
    layer, y, dx, gradients = published

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def run(parameters, x):
        y, stats = layer.ours(parameters, x, **how)
        return (y * COTANGENT).sum(), (y, stats)

    (_, (ours, stats)), (ours_gradients, ours_dx) = run(layer.parameters(), jnp.asarray(X))
    close(ours, y, "y")
    close(ours_dx, dx, "dx")
    for name, gradient in gradients.items():
        close(ours_gradients[name], gradient, name)
    assert float(stats.expert_tokens.sum()) == X[..., 0].size * layer.k
    assert float(stats.dropped_fraction) == 0


@pytest.mark.parametrize("routing", ["capacity", "dropless"])
def test_one_device_gives_what_transformers_gives(published, routing):
    assert_equal_to_transformers(published, routing=routing, capacity_factor=E)


@pytest.mark.parametrize("routing", ["capacity", "dropless"])
@pytest.mark.parametrize("axis", ["expert", None], ids=["experts-split", "experts-gathered"])
def test_a_mesh_gives_what_transformers_gives(published, routing, axis):
    assert_equal_to_transformers(
        published, routing=routing, capacity_factor=E, mesh=whole_mesh(), axis=axis
    )


def test_drops_and_statistics_do_not_depend_on_the_mesh(published):
    layer, *_ = published
    how = {"routing": "capacity", "capacity_factor": 1.0, "groups": 4}
    parameters, x = layer.parameters(), jnp.asarray(X)
    alone, alone_stats = jax.jit(functools.partial(layer.ours, **how))(parameters, x)
    spread, stats = jax.jit(functools.partial(layer.ours, mesh=whole_mesh(), **how))(parameters, x)
    close(spread, alone, "y")
    assert float(stats.dropped_fraction) > 0
    for ours, theirs in zip(jax.tree.leaves(stats), jax.tree.leaves(alone_stats), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("routing", ["capacity", "dropless"])
def test_biases_move_with_their_experts(routing):
    layer = gpt_oss()
    random = np.random.default_rng(1)
    parameters = {
        name: jnp.asarray(random.normal(size=value.shape), jnp.float32)
        for name, value in layer.parameters().items()
    }
    arrays, keywords = layer.arguments(parameters, jnp.asarray(X))
    order = jnp.asarray([3, 7, 0, 2, 5, 1, 6, 4])
    move = functools.partial(place_experts, placement=order)

    @jax.jit
    def run(x, router_w, weights, biases, **placed):
        return moe_ffn(
            x, router_w, *weights, k=3, routing=routing, mesh=whole_mesh(), biases=biases,
            logit_bias=keywords["logit_bias"], activation="clamped_swiglu", **placed,
        )[0]  # fmt: skip

    x, router_w, *weights = arrays
    home = run(x, router_w, weights, keywords["biases"])
    moved = run(*(x, router_w, *jax.tree.map(move, (weights, keywords["biases"]))), placement=order)
    close(moved, home, "y")
