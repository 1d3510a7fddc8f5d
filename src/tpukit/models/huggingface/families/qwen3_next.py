"""Qwen3-Next: three layers of the gated delta rule to one of gated attention, all with experts."""

from typing import Any

from ...transformer.config import TransformerConfig
from ...transformer.layer_config import LayerConfig
from ...transformer.layer_pattern import spell_pattern
from ..rope import read_rope, write_rope
from ..slots import usual_slots
from ..tensors import Slot, in_blocks
from .family import Family, Json, kind_of_types

_KINDS = {"linear_attention": "linear", "full_attention": "full"}
_TYPES = {ours: theirs for theirs, ours in _KINDS.items()}


def _read(data: Json) -> dict[str, Any]:
    types = kind_of_types(data, _KINDS, default="full_attention")
    if not data.get("layer_types"):
        step = data.get("full_attention_interval", 4)
        types = ["full" if (n + 1) % step == 0 else "linear" for n in range(len(types))]
    delta = {
        "key_heads": data["linear_num_key_heads"],
        "value_heads": data["linear_num_value_heads"],
        "key_dim": data["linear_key_head_dim"],
        "value_dim": data["linear_value_head_dim"],
        "convolution": data.get("linear_conv_kernel_dim", 4),
    }
    full = {"attention_gate": True, "qk_norm": "head"}
    return {
        **read_rope(data),
        "norm_offset": True,
        "n_experts": data["num_experts"],
        "experts_per_token": data["num_experts_per_tok"],
        "expert_d_ff": data["moe_intermediate_size"],
        "shared_d_ff": data["shared_expert_intermediate_size"],
        "shared_gate": True,
        "router_normalize": bool(data.get("norm_topk_prob", True)),
        "router_balance_weight": data.get("router_aux_loss_coef", 0.001),
        "layer_kinds": {"linear": {"delta": delta}, "full": full},
        "layer_pattern": spell_pattern(types),
    }


def _write(config: TransformerConfig) -> dict[str, Any]:
    delta = next((layer.delta for _, layer in config.layers() if layer.delta), None)
    if delta is None:
        return {}
    return {
        "rope_parameters": write_rope(config),
        "partial_rotary_factor": config.rope_share,
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_d_ff,
        "shared_expert_intermediate_size": config.shared_d_ff,
        "norm_topk_prob": config.router_normalize,
        "router_aux_loss_coef": config.router_balance_weight,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.convolution,
        "layer_types": [_TYPES.get(kind, "full_attention") for kind in config.layer_order],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _slots(layer: LayerConfig, d_model: int, data: Json) -> dict[str, Slot]:
    slots = usual_slots(layer, d_model)
    for name in ("gate_proj", "up_proj", "down_proj"):
        slots[f"mlp/shared/{name}/kernel"] = Slot(f"mlp.shared_expert.{name}.weight", True)
    slots["mlp/shared_gate/kernel"] = Slot("mlp.shared_expert_gate.weight", True)
    return slots | (_full(layer) if layer.delta is None else _linear(layer))


def _full(layer: LayerConfig) -> dict[str, Slot]:
    """Each head of queries is followed by its gate."""
    parts = in_blocks(layer.n_heads, {"q_proj": layer.head_dim, "g_proj": layer.head_dim})
    whole = 2 * layer.n_heads * layer.head_dim
    return {
        f"self_attention/{name}/kernel": Slot("self_attn.q_proj.weight", True, part=part, of=whole)
        for name, part in parts.items()
    }


def _linear(layer: LayerConfig) -> dict[str, Slot]:
    """Queries, keys, values and gates lie together by key head, as do both small inputs."""
    d = layer.delta
    assert d is not None
    each = d.value_heads // d.key_heads
    values = each * d.value_dim
    wide = {"q_proj": d.key_dim, "k_proj": d.key_dim, "v_proj": values, "z_proj": values}
    slots: dict[str, Slot] = {}
    for stored, sizes in (("in_proj_qkvz", wide), ("in_proj_ba", {"b_proj": each, "a_proj": each})):
        whole = d.key_heads * sum(sizes.values())
        for name, part in in_blocks(d.key_heads, sizes).items():
            slots[f"delta_attention/{name}/kernel"] = Slot(
                f"linear_attn.{stored}.weight", True, part=part, of=whole
            )
    keys = d.key_heads * d.key_dim
    channels = 2 * keys + d.value_heads * d.value_dim
    ends = {"q": (0, keys), "k": (keys, 2 * keys), "v": (2 * keys, channels)}
    for name, (start, end) in ends.items():
        slots[f"delta_attention/{name}_conv/kernel"] = Slot(
            "linear_attn.conv1d.weight", part=slice(start, end), of=channels, middle=True
        )
    slots["delta_attention/a_log"] = Slot("linear_attn.A_log")
    slots["delta_attention/dt_bias"] = Slot("linear_attn.dt_bias")
    slots["delta_attention/norm/scale"] = Slot("linear_attn.norm.weight")
    slots["delta_attention/o_proj/kernel"] = Slot("linear_attn.out_proj.weight", transposed=True)
    return slots


QWEN3_NEXT = Family("qwen3_next", "Qwen3NextForCausalLM", _read, _write, _slots)
