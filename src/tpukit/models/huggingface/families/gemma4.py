"""Gemma 4: wide global heads without values of their own, experts beside an MLP, shared keys."""

from typing import Any

from ...transformer.config import TransformerConfig
from ...transformer.layer_config import LayerConfig
from ...transformer.layer_pattern import spell_pattern
from ..rope import read_rope, write_rope
from ..slots import usual_slots
from ..tensors import Slot
from .family import Family, Json, kind_of_types, write_activation
from .gemma import LOCAL_AND_GLOBAL, TYPES

_SHARED = {"local": "reading_local", "global": "reading_global"}


def _read(data: Json) -> dict[str, Any]:
    order = kind_of_types(data, LOCAL_AND_GLOBAL, default="sliding_attention")
    kinds = {"local": _local(data), "global": _global(data, order)}
    first_shared = len(order) - (data.get("num_kv_shared_layers") or 0)
    widths = data["intermediate_size"] * (2 if data.get("use_double_wide_mlp") else 1)
    for kind, reader in _SHARED.items():
        kinds[reader] = {**kinds[kind], "shares_keys_of": kind, "keys_as_values": False}
        kinds[reader] |= {"v_norm": False, "d_ff": widths}
    order = [k if n < first_shared else _SHARED[k] for n, k in enumerate(order)]
    fields = {
        "norm_offset": False,
        "post_norms": True,
        "qk_norm": "head",
        "v_norm": True,
        "attention_scale": 1.0,
        "logit_soft_cap": data.get("final_logit_softcapping"),
        "scale_embeddings": True,
        "tied_embeddings": bool(data.get("tie_word_embeddings", True)),
        "layer_scalar": True,
        "per_layer_width": data.get("hidden_size_per_layer_input") or 0,
        "layer_kinds": {kind: kinds[kind] for kind in kinds if kind in order},
        "layer_pattern": spell_pattern(order),
    }
    if data.get("enable_moe_block"):
        fields |= {
            "n_experts": data["num_experts"],
            "experts_per_token": data["top_k_experts"],
            "expert_d_ff": data["moe_intermediate_size"],
            "dense_beside_experts": True,
            "router_norm": True,
        }
    return fields


def _local(data: Json) -> dict[str, Any]:
    return {**read_rope(data, "sliding_attention"), "sliding_window": data["sliding_window"]}


def _global(data: Json, order: list[str]) -> dict[str, Any]:
    """What global layers differ in; files give it by number of layer, or in words of its own."""
    found = {**read_rope(data, "full_attention")}
    listed = data.get("per_layer_config") or {}
    numbers = [str(number) for number, kind in enumerate(order) if kind == "global"]
    own = next((listed[number] for number in numbers if number in listed), {})
    width = own.get("head_dim") or data.get("global_head_dim")
    heads = own.get("num_key_value_heads") or data.get("num_global_key_value_heads")
    found |= {"head_dim": width} if width else {}
    found |= {"n_kv_heads": heads} if heads else {}
    return found | ({"keys_as_values": True} if data.get("attention_k_eq_v") else {})


def _write(config: TransformerConfig) -> dict[str, Any]:
    own = {reader: kind for kind, reader in _SHARED.items()}
    order = [own.get(kind, kind) for kind in config.layer_order]
    local = config.kinds.get("local", config)
    whole = config.kinds.get("global", config)
    shared = [config.kinds[kind] for kind in config.layer_order if kind in own]
    experts = config.n_experts > 0
    return {
        "hidden_activation": write_activation(config.activation),
        "rope_parameters": {
            TYPES[kind]: write_rope(config.kinds[kind]) for kind in TYPES if kind in config.kinds
        },
        "layer_types": [TYPES.get(kind, "full_attention") for kind in order],
        "sliding_window": local.sliding_window,
        "global_head_dim": whole.head_dim,
        "num_global_key_value_heads": whole.n_kv_heads,
        "attention_k_eq_v": whole.keys_as_values,
        "num_kv_shared_layers": len(shared),
        "use_double_wide_mlp": any(layer.d_ff != config.d_ff for layer in shared),
        "final_logit_softcapping": config.logit_soft_cap,
        "hidden_size_per_layer_input": config.per_layer_width,
        "vocab_size_per_layer_input": config.vocab_size,
        "enable_moe_block": experts,
        "num_experts": config.n_experts if experts else None,
        "top_k_experts": config.experts_per_token if experts else None,
        "moe_intermediate_size": config.expert_d_ff if experts else None,
    }


def _slots(layer: LayerConfig, d_model: int, data: Json) -> dict[str, Slot]:
    slots = usual_slots(layer, d_model)
    for ours, theirs in {
        "dense_norm": "post_feedforward_layernorm_1",
        "experts_input_norm": "pre_feedforward_layernorm_2",
        "experts_norm": "post_feedforward_layernorm_2",
    }.items():
        slots[f"mlp/{ours}/scale"] = Slot(f"{theirs}.weight")
    for name in ("gate_proj", "up_proj", "down_proj"):
        slots[f"mlp/dense/{name}/kernel"] = Slot(f"mlp.{name}.weight", transposed=True)
    width = layer.expert_d_ff
    for number, name in enumerate(("gate_proj", "up_proj")):
        part = slice(number * width, (number + 1) * width)
        slots[f"mlp/experts/{name}"] = Slot(
            "experts.gate_up_proj", True, axis=1, part=part, of=2 * width
        )
    slots["mlp/experts/down_proj"] = Slot("experts.down_proj", transposed=True)
    slots["mlp/router/kernel"] = Slot("router.proj.weight", transposed=True)
    slots["mlp/router/scale"] = Slot("router.scale")
    slots["mlp/router/expert_scale"] = Slot("router.per_expert_scale")
    slots["per_layer_gate/kernel"] = Slot("per_layer_input_gate.weight", transposed=True)
    slots["per_layer_proj/kernel"] = Slot("per_layer_projection.weight", transposed=True)
    slots["per_layer_norm/scale"] = Slot("post_per_layer_input_norm.weight")
    return slots


GEMMA4 = Family("gemma4_text", "Gemma4ForCausalLM", _read, _write, _slots, also=("gemma4",))
