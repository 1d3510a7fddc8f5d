"""Families with local and global layers: Gemma 2 to 4, OLMo 2 and 3, GPT-OSS."""

import numpy as np

from ....plain_data import JsonObject
from ...transformer.config import TransformerConfig
from ...transformer.layer_config import LayerConfig
from ...transformer.layer_pattern import spell_pattern
from ..rope import read_rope, write_rope
from ..tensors import TensorSlice, usual_tensors
from .family import (
    ConfigEntry,
    Family,
    Json,
    Table,
    balance_weight,
    kinds_by_type,
    mlp_tensors,
    read_entries,
    side_by_side,
    write_activation,
    write_entries,
)

_KINDS = {"sliding_attention": "local", "full_attention": "global"}
_TYPES = {kind: layer_type for layer_type, kind in _KINDS.items()}
# The layers of Gemma 4 that read the keys of another layer.
_READERS = {"local": "reading_local", "global": "reading_global"}
_OLMO_NORMS = {"pre_norms": False, "post_norms": True, "qk_norm": "across_heads"}
_GEMMA: Table = (
    ConfigEntry("attention_soft_cap", "attn_logit_softcapping", None),
    ConfigEntry("logit_soft_cap", "final_logit_softcapping", None),
)
_GEMMA4: Table = (
    ConfigEntry("logit_soft_cap", "final_logit_softcapping", None),
    ConfigEntry("per_layer_width", "hidden_size_per_layer_input", 0, read=lambda value: value or 0),
)
_GEMMA4_EXPERTS: Table = (
    ConfigEntry("n_experts", "num_experts"),
    ConfigEntry("experts_per_token", "top_k_experts"),
    ConfigEntry("expert_d_ff", "moe_intermediate_size"),
)
_GPT_OSS: Table = (
    ConfigEntry("n_experts", "num_local_experts"),
    ConfigEntry("experts_per_token", "num_experts_per_tok"),
    balance_weight(0.9),
)


def _kinds(data: Json, *, every: int) -> list[str]:
    """Return the kind of every layer; without `layer_types`, each `every`-th is global."""
    if data.get("layer_types"):
        return kinds_by_type(data, _KINDS, default="sliding_attention")
    step = data.get("sliding_window_pattern") or data.get("_sliding_window_pattern") or every
    count = data["num_hidden_layers"]
    return ["local" if (number + 1) % step else "global" for number in range(count)]


def _write_kinds(config: TransformerConfig) -> JsonObject:
    local = config.kinds.get("local")
    return {
        "sliding_window": None if local is None else local.sliding_window,
        "layer_types": [_TYPES.get(kind, "full_attention") for kind in config.layer_order],
    }


def _write_ropes(config: TransformerConfig) -> JsonObject:
    """Return `rope_parameters` by layer type."""
    return {
        layer_type: write_rope(config.kinds[kind])
        for layer_type, kind in _KINDS.items()
        if kind in config.kinds
    }


def _read_gemma(data: Json) -> JsonObject:
    width = data.get("query_pre_attn_scalar", 256)
    return {
        **read_entries(_GEMMA, data),
        "attention_scale": None if width == data.get("head_dim") else float(width) ** -0.5,
        "norm_offset": True,
        "post_norms": True,
        "scale_embeddings": True,
        "tied_embeddings": bool(data.get("tie_word_embeddings", True)),
    }


def _write_gemma(config: TransformerConfig) -> JsonObject:
    width = config.head_dim if config.attention_scale is None else config.attention_scale**-2
    return {
        "hidden_activation": write_activation(config.activation),
        "query_pre_attn_scalar": round(width),
        **write_entries(_GEMMA, config),
        **_write_kinds(config),
    }


def _read_gemma2(data: Json) -> JsonObject:
    kinds = {"local": {"sliding_window": data.get("sliding_window", 4096)}, "global": {}}
    pattern = spell_pattern(_kinds(data, every=2))
    return {**_read_gemma(data), **read_rope(data), "layer_kinds": kinds, "layer_pattern": pattern}


def _write_gemma2(config: TransformerConfig) -> JsonObject:
    return {**_write_gemma(config), "rope_parameters": write_rope(config)}


def _read_gemma3(data: Json) -> JsonObject:
    if data.get("rope_parameters"):
        rope = read_rope(data, "full_attention")
        local = read_rope(data, "sliding_attention")
    else:
        rope = read_rope({"rope_theta": 1_000_000.0, **data})
        local = read_rope({"rope_theta": data.get("rope_local_base_freq", 10_000.0)})
    local = {"rope_scaling": {}, **local, "sliding_window": data.get("sliding_window", 4096)}
    return {
        **_read_gemma(data),
        **rope,
        "qk_norm": "head",
        "layer_kinds": {"local": local, "global": {}},
        "layer_pattern": spell_pattern(_kinds(data, every=6)),
    }


def _write_gemma3(config: TransformerConfig) -> JsonObject:
    return {**_write_gemma(config), "rope_parameters": _write_ropes(config)}


def _read_gemma4(data: Json) -> JsonObject:
    order = kinds_by_type(data, _KINDS, default="sliding_attention")
    local = {**read_rope(data, "sliding_attention"), "sliding_window": data["sliding_window"]}
    kinds = {"local": local, "global": _gemma4_global(data, order)}
    first_shared = len(order) - (data.get("num_kv_shared_layers") or 0)
    width = data["intermediate_size"] * (2 if data.get("use_double_wide_mlp") else 1)
    for kind, reader in _READERS.items():
        kinds[reader] = {**kinds[kind], "shares_keys_of": kind, "keys_as_values": False}
        kinds[reader] |= {"v_norm": False, "d_ff": width}
    order = [kind if n < first_shared else _READERS[kind] for n, kind in enumerate(order)]
    fields = {
        **read_entries(_GEMMA4, data),
        "norm_offset": False,
        "post_norms": True,
        "qk_norm": "head",
        "v_norm": True,
        "attention_scale": 1.0,
        "scale_embeddings": True,
        "tied_embeddings": bool(data.get("tie_word_embeddings", True)),
        "layer_scalar": True,
        "layer_kinds": {kind: kinds[kind] for kind in kinds if kind in order},
        "layer_pattern": spell_pattern(order),
    }
    if data.get("enable_moe_block"):
        fields |= read_entries(_GEMMA4_EXPERTS, data)
        fields |= {"dense_beside_experts": True, "router_norm": True}
    return fields


def _gemma4_global(data: Json, order: list[str]) -> JsonObject:
    """Return the fields of global layers, which files give by layer number or in own entries."""
    fields = {**read_rope(data, "full_attention")}
    listed = data.get("per_layer_config") or {}
    numbers = [str(number) for number, kind in enumerate(order) if kind == "global"]
    own = next((listed[number] for number in numbers if number in listed), {})
    width = own.get("head_dim") or data.get("global_head_dim")
    heads = own.get("num_key_value_heads") or data.get("num_global_key_value_heads")
    fields |= {"head_dim": width} if width else {}
    fields |= {"n_kv_heads": heads} if heads else {}
    return fields | ({"keys_as_values": True} if data.get("attention_k_eq_v") else {})


def _write_gemma4(config: TransformerConfig) -> JsonObject:
    own = {reader: kind for kind, reader in _READERS.items()}
    order = [own.get(kind, kind) for kind in config.layer_order]
    local = config.kinds.get("local", config)
    wide = config.kinds.get("global", config)
    shared = [config.kinds[kind] for kind in config.layer_order if kind in own]
    experts = write_entries(_GEMMA4_EXPERTS, config)
    return {
        "hidden_activation": write_activation(config.activation),
        "rope_parameters": _write_ropes(config),
        "layer_types": [_TYPES.get(kind, "full_attention") for kind in order],
        "sliding_window": local.sliding_window,
        "global_head_dim": wide.head_dim,
        "num_global_key_value_heads": wide.n_kv_heads,
        "attention_k_eq_v": wide.keys_as_values,
        "num_kv_shared_layers": len(shared),
        "use_double_wide_mlp": any(layer.d_ff != config.d_ff for layer in shared),
        **write_entries(_GEMMA4, config),
        "vocab_size_per_layer_input": config.vocab_size,
        "enable_moe_block": config.n_experts > 0,
        **(experts if config.n_experts > 0 else dict.fromkeys(experts)),
    }


def _gemma4_tensors(layer: LayerConfig, d_model: int, data: Json) -> dict[str, TensorSlice]:
    paths = ("mlp/experts/gate_proj", "mlp/experts/up_proj")
    return {
        **usual_tensors(layer, d_model),
        "mlp/dense_norm/scale": TensorSlice("post_feedforward_layernorm_1.weight"),
        "mlp/experts_input_norm/scale": TensorSlice("pre_feedforward_layernorm_2.weight"),
        "mlp/experts_norm/scale": TensorSlice("post_feedforward_layernorm_2.weight"),
        **mlp_tensors("mlp/dense", "mlp"),
        **side_by_side("experts.gate_up_proj", paths, layer.expert_d_ff, axis=1, transposed=True),
        "mlp/experts/down_proj": TensorSlice("experts.down_proj", transposed=True),
        "mlp/router/kernel": TensorSlice("router.proj.weight", transposed=True),
        "mlp/router/scale": TensorSlice("router.scale"),
        "mlp/router/expert_scale": TensorSlice("router.per_expert_scale"),
        "per_layer_gate/kernel": TensorSlice("per_layer_input_gate.weight", transposed=True),
        "per_layer_proj/kernel": TensorSlice("per_layer_projection.weight", transposed=True),
        "per_layer_norm/scale": TensorSlice("post_per_layer_input_norm.weight"),
    }


def _read_olmo2(data: Json) -> JsonObject:
    return {**_OLMO_NORMS, **read_rope(data)}


def _write_olmo2(config: TransformerConfig) -> JsonObject:
    return {"rope_parameters": write_rope(config)}


def _read_olmo3(data: Json) -> JsonObject:
    full = read_rope(data, "full_attention")
    # Files of transformers 4 have one entry for all layers, which applies to global layers only.
    separate = "sliding_attention" in (data.get("rope_parameters") or {})
    local = read_rope(data, "sliding_attention") if separate else {"rope_theta": full["rope_theta"]}
    local = {"rope_scaling": {}, **local, "sliding_window": data.get("sliding_window", 4096)}
    return {
        **_OLMO_NORMS,
        **full,
        "layer_kinds": {"local": local, "global": {}},
        "layer_pattern": spell_pattern(_kinds(data, every=4)),
    }


def _write_olmo3(config: TransformerConfig) -> JsonObject:
    return {"rope_parameters": _write_ropes(config), **_write_kinds(config)}


def _read_gpt_oss(data: Json) -> JsonObject:
    kinds = kinds_by_type(data, _KINDS, default="full_attention")
    if not data.get("layer_types"):
        kinds = ["global" if number % 2 else "local" for number in range(len(kinds))]
    return {
        **read_rope(data),
        **read_entries(_GPT_OSS, data),
        "attention_bias": "qkvo" if data.get("attention_bias", True) else None,
        "attention_sinks": True,
        "activation": "clamped_swiglu",
        "expert_bias": True,
        "router_bias": True,
        "layer_kinds": {"local": {"sliding_window": data.get("sliding_window", 128)}, "global": {}},
        "layer_pattern": spell_pattern(kinds),
    }


def _write_gpt_oss(config: TransformerConfig) -> JsonObject:
    return {
        "rope_parameters": write_rope(config),
        **write_entries(_GPT_OSS, config),
        **_write_kinds(config),
        "swiglu_limit": 7.0,
    }


def _gpt_oss_tensors(layer: LayerConfig, d_model: int, data: Json) -> dict[str, TensorSlice]:
    tensors = usual_tensors(layer, d_model)
    tensors["mlp/router/kernel"] = TensorSlice("mlp.router.weight", transposed=True)
    tensors["mlp/router/bias"] = TensorSlice("mlp.router.bias")
    size = 2 * layer.expert_d_ff
    for first, name in enumerate(("gate", "up")):
        part = np.arange(first, size, 2)  # gate and up columns alternate
        tensors[f"mlp/experts/{name}_proj"] = TensorSlice(
            "mlp.experts.gate_up_proj", axis=2, part=part, axis_size=size
        )
        tensors[f"mlp/experts/{name}_bias"] = TensorSlice(
            "mlp.experts.gate_up_proj_bias", axis=1, part=part, axis_size=size
        )
    tensors["mlp/experts/down_proj"] = TensorSlice("mlp.experts.down_proj")
    tensors["mlp/experts/down_bias"] = TensorSlice("mlp.experts.down_proj_bias")
    return tensors


GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", _read_gemma2, _write_gemma2)
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", _read_gemma3, _write_gemma3, also=("gemma3",))
GEMMA4 = Family(
    *("gemma4_text", "Gemma4ForCausalLM"),
    _read_gemma4,
    _write_gemma4,
    _gemma4_tensors,
    also=("gemma4",),
)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, _write_olmo2)
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", _read_olmo3, _write_olmo3)
GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", _read_gpt_oss, _write_gpt_oss, _gpt_oss_tensors)
