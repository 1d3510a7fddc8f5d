"""DeepSeek V2 and V3, and Kimi K2: latent attention, shared experts, leading dense layers."""

import math
from typing import Any

from ....errors import TPUModelError
from ...transformer.config import TransformerConfig
from ...transformer.layer_config import LayerConfig
from ...transformer.layer_pattern import spell_pattern
from ..rope import read_rope, write_rope, yarn_growth
from ..slots import usual_slots
from ..tensors import Slot, halves_of_pairs
from .family import Family, Json


def _read(data: Json) -> dict[str, Any]:
    leading = min(data.get("first_k_dense_replace", 0), data["num_hidden_layers"])
    order = ["dense"] * leading + ["moe"] * (data["num_hidden_layers"] - leading)
    width = data["moe_intermediate_size"]
    experts = {
        "n_experts": data["n_routed_experts"],
        "experts_per_token": data["num_experts_per_tok"],
        "expert_d_ff": width,
        "shared_d_ff": width * (data.get("n_shared_experts") or 0),
        "router_scale": float(data.get("routed_scaling_factor", 1.0)),
    }
    latent = {
        "kv_rank": data["kv_lora_rank"],
        "q_rank": data.get("q_lora_rank") or 0,
        "nope_dim": data["qk_nope_head_dim"],
        "rope_dim": data["qk_rope_head_dim"],
        "v_dim": data["v_head_dim"],
    }
    return {
        **read_rope(data),
        "n_kv_heads": data["num_attention_heads"],
        "head_dim": data["qk_nope_head_dim"] + data["qk_rope_head_dim"],
        "latent": latent,
        "attention_scale": _scale(data),
        "router_balance_weight": data.get("aux_loss_alpha", 0.001),
        "layer_kinds": {"dense": {}, "moe": experts},
        "layer_pattern": spell_pattern(order),
    }


def _scale(data: Json) -> float | None:
    """Scores grow with the context they are stretched to, where a file says by how much."""
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    weight = scaling.get("mscale_all_dim")
    if not weight or (scaling.get("rope_type") or scaling.get("type")) == "default":
        return None
    width = data["qk_nope_head_dim"] + data["qk_rope_head_dim"]
    return width**-0.5 * yarn_growth(scaling["factor"], weight) ** 2


def _read_v2(data: Json) -> dict[str, Any]:
    fields = _read(data)
    method = data.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise TPUModelError(
            f"topk_method '{method}' is not supported; supported are greedy and "
            "group_limited_greedy."
        )
    experts = fields["layer_kinds"]["moe"]
    # transformers never normalises the weights of V2, whatever the file says.
    experts |= {"router_normalize": False}
    if method == "group_limited_greedy":
        experts |= {
            "router_groups": data["n_group"],
            "router_groups_kept": data["topk_group"],
            "router_group_top": 1,
        }
    return fields


def _read_v3(data: Json) -> dict[str, Any]:
    fields = _read(data)
    fields["mtp_layers"] = data.get("num_nextn_predict_layers") or 0
    fields["layer_kinds"]["moe"] |= {
        "router_score": "sigmoid",
        "router_choice_bias": True,
        "router_normalize": bool(data.get("norm_topk_prob", True)),
    }
    if (data.get("n_group") or 1) > 1:
        fields["layer_kinds"]["moe"] |= {
            "router_groups": data["n_group"],
            "router_groups_kept": data["topk_group"],
        }
    return fields


def _write(config: TransformerConfig) -> dict[str, Any]:
    moe = config.kinds.get("moe", config)
    latent = config.latent
    if latent is None:
        return {}
    return {
        "rope_parameters": _rope(config),
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank or None,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_head_dim": latent.qk_dim,
        "v_head_dim": latent.v_dim,
        "head_dim": latent.rope_dim,
        "n_routed_experts": moe.n_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.expert_d_ff,
        "n_shared_experts": moe.shared_d_ff // max(1, moe.expert_d_ff),
        "routed_scaling_factor": moe.router_scale,
        "norm_topk_prob": moe.router_normalize,
        "aux_loss_alpha": config.router_balance_weight,
        "first_k_dense_replace": sum(kind == "dense" for kind in config.layer_order),
        "n_group": moe.router_groups or 1,
        "topk_group": moe.router_groups_kept or 1,
    }


def _write_v2(config: TransformerConfig) -> dict[str, Any]:
    moe = config.kinds.get("moe", config)
    return {
        **_write(config),
        "topk_method": "group_limited_greedy" if moe.router_groups else "greedy",
    }


def _write_v3(config: TransformerConfig) -> dict[str, Any]:
    depths = {"num_nextn_predict_layers": config.mtp_layers}
    return {**_write(config), "rope_interleave": True, **depths}


def _rope(config: TransformerConfig) -> dict[str, Any]:
    rope, scaling = write_rope(config), config.rope_scaling
    if config.attention_scale is None or scaling is None or scaling.factor <= 1:
        return rope
    growth = math.sqrt(config.attention_scale * math.sqrt(config.qk_dim))
    weight = round((growth - 1) / (0.1 * math.log(scaling.factor)), 9)
    if rope.get("attention_factor") == 1:
        del rope["attention_factor"]
    return {**rope, "mscale": weight, "mscale_all_dim": weight}


def _slots(layer: LayerConfig, d_model: int, data: Json) -> dict[str, Slot]:
    slots = usual_slots(layer, d_model)
    latent = layer.latent
    assert latent is not None
    names = {"q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm"}
    for ours, theirs in names.items():
        slots[f"self_attention/{ours}/scale"] = Slot(f"self_attn.{theirs}.weight")
    queries = "q_b_proj" if latent.q_rank else "q_proj"
    turned, shared = None, None
    if data.get("rope_interleave", True):
        turned = halves_of_pairs(latent.rope_dim, heads=layer.n_heads, before=latent.nope_dim)
        shared = halves_of_pairs(latent.rope_dim, before=latent.kv_rank)
    slots[f"self_attention/{queries}/kernel"] = Slot(
        f"self_attn.{queries}.weight", True, part=turned
    )
    slots["self_attention/kv_a_proj/kernel"] = Slot(
        "self_attn.kv_a_proj_with_mqa.weight", True, part=shared
    )
    for name in ("gate_proj", "up_proj", "down_proj"):
        slots[f"mlp/shared/{name}/kernel"] = Slot(f"mlp.shared_experts.{name}.weight", True)
    slots["mlp/router/choice_bias"] = Slot("mlp.gate.e_score_correction_bias")
    return slots


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", _read_v2, _write_v2, _slots)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _read_v3,
    _write_v3,
    _slots,
    also=("kimi_k2",),
    prediction={
        "embed_norm/scale": Slot("enorm.weight"),
        "hidden_norm/scale": Slot("hnorm.weight"),
        "proj/kernel": Slot("eh_proj.weight", transposed=True),
        "final_norm/scale": Slot("shared_head.norm.weight"),
    },
)
