"""OLMo 2 and 3: norms after blocks only, and one over all heads of queries and of keys."""

from typing import Any

from ...transformer.config import TransformerConfig
from ...transformer.layer_pattern import spell_pattern
from ..rope import read_rope, write_rope
from .family import Family, Json
from .gemma import TYPES, layer_types

_NORMS = {"pre_norms": False, "post_norms": True, "qk_norm": "across_heads"}


def _read_olmo2(data: Json) -> dict[str, Any]:
    return {**_NORMS, **read_rope(data)}


def _write_olmo2(config: TransformerConfig) -> dict[str, Any]:
    return {"rope_parameters": write_rope(config)}


def _read_olmo3(data: Json) -> dict[str, Any]:
    full = read_rope(data, "full_attention")
    # Files of transformers 4 have one entry for all layers, and it is not meant for local ones.
    separate = "sliding_attention" in (data.get("rope_parameters") or {})
    local = read_rope(data, "sliding_attention") if separate else {"rope_theta": full["rope_theta"]}
    local = {"rope_scaling": {}, **local, "sliding_window": data.get("sliding_window", 4096)}
    return {
        **_NORMS,
        **full,
        "layer_kinds": {"local": local, "global": {}},
        "layer_pattern": spell_pattern(layer_types(data, every=4)),
    }


def _write_olmo3(config: TransformerConfig) -> dict[str, Any]:
    local = config.kinds.get("local")
    return {
        "rope_parameters": {
            theirs: write_rope(config.kinds[ours])
            for ours, theirs in TYPES.items()
            if ours in config.kinds
        },
        "sliding_window": None if local is None else local.sliding_window,
        "layer_types": [TYPES.get(kind, "full_attention") for kind in config.layer_order],
    }


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, _write_olmo2)
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", _read_olmo3, _write_olmo3)
