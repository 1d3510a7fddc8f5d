"""DeepSeek V2 and V3, and Kimi K2: latent attention, shared experts, dense first layers."""

import math

from ....errors import TPUModelError
from ....plain_data import JsonObject
from ...transformer.config import TransformerConfig
from ...transformer.layer_config import LayerConfig
from ...transformer.layer_pattern import spell_pattern
from ..rope import read_rope, write_rope, yarn_growth
from ..tensors import TensorSlice, halves_of_pairs, usual_tensors
from .family import ConfigEntry, Family, Json, Table, mlp_tensors, read_entries, write_entries

_LATENT: Table = (
    ConfigEntry("kv_rank", "kv_lora_rank"),
    ConfigEntry(
        "q_rank",
        "q_lora_rank",
        0,
        read=lambda value: value or 0,
        write=lambda value: value or None,
    ),
    ConfigEntry("nope_dim", "qk_nope_head_dim"),
    ConfigEntry("rope_dim", "qk_rope_head_dim"),
    ConfigEntry("v_dim", "v_head_dim"),
)
_EXPERTS: Table = (
    ConfigEntry("n_experts", "n_routed_experts"),
    ConfigEntry("experts_per_token", "num_experts_per_tok"),
    ConfigEntry("expert_d_ff", "moe_intermediate_size"),
    ConfigEntry("router_scale", "routed_scaling_factor", 1.0, read=float),
)
_BALANCE: Table = (ConfigEntry("router_balance_weight", "aux_loss_alpha", 0.001),)


def _read(data: Json) -> JsonObject:
    leading = min(data.get("first_k_dense_replace", 0), data["num_hidden_layers"])
    order = ["dense"] * leading + ["moe"] * (data["num_hidden_layers"] - leading)
    width = data["moe_intermediate_size"]
    shared = {"shared_d_ff": width * (data.get("n_shared_experts") or 0)}
    return {
        **read_rope(data),
        **read_entries(_BALANCE, data),
        "n_kv_heads": data["num_attention_heads"],
        "head_dim": data["qk_nope_head_dim"] + data["qk_rope_head_dim"],
        "latent": read_entries(_LATENT, data),
        "attention_scale": _scale(data),
        "layer_kinds": {"dense": {}, "moe": {**read_entries(_EXPERTS, data), **shared}},
        "layer_pattern": spell_pattern(order),
    }


def _scale(data: Json) -> float | None:
    """Return the scale of scores, which YaRN with `mscale_all_dim` makes larger; else None."""
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    weight = scaling.get("mscale_all_dim")
    if not weight or (scaling.get("rope_type") or scaling.get("type")) == "default":
        return None
    width = data["qk_nope_head_dim"] + data["qk_rope_head_dim"]
    return width**-0.5 * yarn_growth(scaling["factor"], weight) ** 2


def _read_v2(data: Json) -> JsonObject:
    fields = _read(data)
    method = data.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise TPUModelError(
            f"topk_method '{method}' is not supported; supported are greedy and "
            "group_limited_greedy."
        )
    experts = fields["layer_kinds"]["moe"]
    # transformers never normalises the weights of V2, even where the file has norm_topk_prob.
    experts |= {"router_normalize": False}
    if method == "group_limited_greedy":
        experts |= {
            "router_groups": data["n_group"],
            "router_groups_kept": data["topk_group"],
            "router_group_top": 1,
        }
    return fields


def _read_v3(data: Json) -> JsonObject:
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


def _write(config: TransformerConfig) -> JsonObject:
    moe = config.kinds.get("moe", config)
    latent = config.latent
    if latent is None:
        return {}
    return {
        "rope_parameters": _rope(config),
        **write_entries(_LATENT, latent),
        "qk_head_dim": latent.qk_dim,
        "head_dim": latent.rope_dim,
        **write_entries(_EXPERTS, moe),
        "n_shared_experts": moe.shared_d_ff // max(1, moe.expert_d_ff),
        "norm_topk_prob": moe.router_normalize,
        **write_entries(_BALANCE, config),
        "first_k_dense_replace": sum(kind == "dense" for kind in config.layer_order),
        "n_group": moe.router_groups or 1,
        "topk_group": moe.router_groups_kept or 1,
    }


def _write_v2(config: TransformerConfig) -> JsonObject:
    moe = config.kinds.get("moe", config)
    return {
        **_write(config),
        "topk_method": "group_limited_greedy" if moe.router_groups else "greedy",
    }


def _write_v3(config: TransformerConfig) -> JsonObject:
    depths = {"num_nextn_predict_layers": config.mtp_layers}
    return {**_write(config), "rope_interleave": True, **depths}


def _rope(config: TransformerConfig) -> JsonObject:
    rope, scaling = write_rope(config), config.rope_scaling
    if config.attention_scale is None or scaling is None or scaling.factor <= 1:
        return rope
    growth = math.sqrt(config.attention_scale * math.sqrt(config.qk_dim))
    weight = round((growth - 1) / (0.1 * math.log(scaling.factor)), 9)
    if rope.get("attention_factor") == 1:
        del rope["attention_factor"]
    return {**rope, "mscale": weight, "mscale_all_dim": weight}


def _tensors(layer: LayerConfig, d_model: int, data: Json) -> dict[str, TensorSlice]:
    latent = layer.latent
    assert latent is not None
    queries = "q_b_proj" if latent.q_rank else "q_proj"
    query_channels, key_channels = None, None
    if data.get("rope_interleave", True):
        query_channels = halves_of_pairs(
            latent.rope_dim, heads=layer.n_heads, before=latent.nope_dim
        )
        key_channels = halves_of_pairs(latent.rope_dim, before=latent.kv_rank)
    return {
        **usual_tensors(layer, d_model),
        "self_attention/q_a_norm/scale": TensorSlice("self_attn.q_a_layernorm.weight"),
        "self_attention/kv_a_norm/scale": TensorSlice("self_attn.kv_a_layernorm.weight"),
        f"self_attention/{queries}/kernel": TensorSlice(
            f"self_attn.{queries}.weight", True, part=query_channels
        ),
        "self_attention/kv_a_proj/kernel": TensorSlice(
            "self_attn.kv_a_proj_with_mqa.weight", True, part=key_channels
        ),
        **mlp_tensors("mlp/shared", "mlp.shared_experts"),
        "mlp/router/choice_bias": TensorSlice("mlp.gate.e_score_correction_bias"),
    }


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", _read_v2, _write_v2, _tensors)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _read_v3,
    _write_v3,
    _tensors,
    also=("kimi_k2",),
    prediction={
        "embed_norm/scale": TensorSlice("enorm.weight"),
        "hidden_norm/scale": TensorSlice("hnorm.weight"),
        "proj/kernel": TensorSlice("eh_proj.weight", transposed=True),
        "final_norm/scale": TensorSlice("shared_head.norm.weight"),
    },
)
