"""Gemma 2 and 3: local and global layers, norms around both blocks, scaled embeddings."""

from collections.abc import Mapping
from typing import Any

from ...transformer.config import TransformerConfig
from ...transformer.layer_pattern import spell_pattern
from ..rope import read_rope, write_rope
from .family import Family, Json, kind_of_types, write_activation

LOCAL_AND_GLOBAL: Mapping[str, str] = {"sliding_attention": "local", "full_attention": "global"}
_DEFAULT_THETA = {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}
TYPES = {ours: theirs for theirs, ours in LOCAL_AND_GLOBAL.items()}


def layer_types(data: Json, *, every: int) -> list[str]:
    """The kind of every layer; without a list, each `every`-th is global."""
    if data.get("layer_types"):
        return kind_of_types(data, LOCAL_AND_GLOBAL, default="sliding_attention")
    step = data.get("sliding_window_pattern") or data.get("_sliding_window_pattern") or every
    count = data["num_hidden_layers"]
    return ["local" if (number + 1) % step else "global" for number in range(count)]


def _common(data: Json) -> dict[str, Any]:
    width = data.get("query_pre_attn_scalar", 256)
    return {
        "attention_scale": None if width == data.get("head_dim") else float(width) ** -0.5,
        "attention_soft_cap": data.get("attn_logit_softcapping"),
        "logit_soft_cap": data.get("final_logit_softcapping"),
        "norm_offset": True,
        "post_norms": True,
        "scale_embeddings": True,
        "tied_embeddings": bool(data.get("tie_word_embeddings", True)),
    }


def _read_gemma2(data: Json) -> dict[str, Any]:
    kinds = {"local": {"sliding_window": data.get("sliding_window", 4096)}, "global": {}}
    pattern = spell_pattern(layer_types(data, every=2))
    return {**_common(data), **read_rope(data), "layer_kinds": kinds, "layer_pattern": pattern}


def _read_gemma3(data: Json) -> dict[str, Any]:
    if data.get("rope_parameters"):
        rope = read_rope(data, "full_attention")
        local = read_rope(data, "sliding_attention")
    else:
        rope = read_rope({"rope_theta": 1_000_000.0, **data})
        local = read_rope({"rope_theta": data.get("rope_local_base_freq", 10_000.0)})
    local = {"rope_scaling": {}, **local, "sliding_window": data.get("sliding_window", 4096)}
    return {
        **_common(data),
        **rope,
        "qk_norm": "head",
        "layer_kinds": {"local": local, "global": {}},
        "layer_pattern": spell_pattern(layer_types(data, every=6)),
    }


def _write_common(config: TransformerConfig) -> dict[str, Any]:
    width = config.head_dim if config.attention_scale is None else config.attention_scale**-2
    local = config.kinds.get("local")
    return {
        "hidden_activation": write_activation(config.activation),
        "query_pre_attn_scalar": round(width),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        "sliding_window": None if local is None else local.sliding_window,
        "layer_types": [TYPES.get(kind, "full_attention") for kind in config.layer_order],
    }


def _write_gemma2(config: TransformerConfig) -> dict[str, Any]:
    return {**_write_common(config), "rope_parameters": write_rope(config)}


def _write_gemma3(config: TransformerConfig) -> dict[str, Any]:
    ropes = {
        theirs: write_rope(config.kinds[ours])
        for theirs, ours in LOCAL_AND_GLOBAL.items()
        if ours in config.kinds
    }
    return {**_write_common(config), "rope_parameters": ropes}


GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", _read_gemma2, _write_gemma2)
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", _read_gemma3, _write_gemma3, also=("gemma3",))
