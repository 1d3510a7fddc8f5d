"""Llama 4: chunked layers, every fourth without positions, and experts that weigh their input."""

from typing import Any

from ...transformer.config import TransformerConfig
from ...transformer.layer_config import LayerConfig
from ...transformer.layer_pattern import spell_pattern
from ..rope import read_rope, write_rope
from ..slots import usual_slots
from ..tensors import Slot, halves_of_pairs
from .family import Family, Json

_CHUNKED = ("chunked", "dense_chunked")


def _read(data: Json) -> dict[str, Any]:
    count = data["num_hidden_layers"]
    rotated = data.get("no_rope_layers") or [
        (number + 1) % data.get("no_rope_layer_interval", 4) for number in range(count)
    ]
    step = data.get("interleave_moe_layer_step", 1)
    experts = data.get("moe_layers") or list(range(step - 1, count, step))
    order = [
        ("" if number in experts else "dense_") + ("chunked" if rotated[number] else "global")
        for number in range(count)
    ]
    chunked: dict[str, Any] = {"attention_chunk": data.get("attention_chunk_size", 8192)}
    if data.get("use_qk_norm", True):
        chunked["qk_norm"] = "after_rope"
    everywhere: dict[str, Any] = {"positions": "none"}
    if data.get("attn_temperature_tuning", True):
        everywhere["temperature_scale"] = data.get("attn_scale", 0.1)
        everywhere["temperature_floor"] = int(data.get("floor_scale", 8192))
    dense = {"n_experts": 0, "experts_per_token": 0, "expert_d_ff": 0, "shared_d_ff": 0}
    kinds = {
        "chunked": chunked,
        "global": everywhere,
        "dense_chunked": {**chunked, **dense, "router_score": "softmax", "weigh_inputs": False},
        "dense_global": {**everywhere, **dense, "router_score": "softmax", "weigh_inputs": False},
    }
    width = data["intermediate_size"]
    return {
        **read_rope(data),
        "d_ff": data.get("intermediate_size_mlp", width),
        "n_experts": data["num_local_experts"],
        "experts_per_token": data.get("num_experts_per_tok", 1),
        "expert_d_ff": width,
        "shared_d_ff": width,
        "router_score": "sigmoid",
        "router_normalize": False,
        "weigh_inputs": True,
        "router_balance_weight": data.get("router_aux_loss_coef", 0.001),
        "layer_kinds": {kind: kinds[kind] for kind in kinds if kind in order},
        "layer_pattern": spell_pattern(order),
    }


def _write(config: TransformerConfig) -> dict[str, Any]:
    order = config.layer_order
    chunked = next((config.kinds[kind] for kind in order if kind in _CHUNKED), config)
    whole = next((config.kinds[kind] for kind in order if kind not in _CHUNKED), config)
    return {
        "rope_parameters": write_rope(config),
        "intermediate_size": config.expert_d_ff,
        "intermediate_size_mlp": config.d_ff,
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.router_balance_weight,
        "attention_chunk_size": chunked.attention_chunk,
        "use_qk_norm": chunked.qk_norm == "after_rope",
        "attn_temperature_tuning": whole.temperature_scale > 0,
        "attn_scale": whole.temperature_scale or 0.1,
        "floor_scale": whole.temperature_floor,
        "no_rope_layers": [int(kind in _CHUNKED) for kind in order],
        "layer_types": [
            "chunked_attention" if kind in _CHUNKED else "full_attention" for kind in order
        ],
        "moe_layers": [n for n, kind in enumerate(order) if not kind.startswith("dense")],
        "interleave_moe_layer_step": 1,
    }


def _slots(layer: LayerConfig, d_model: int, data: Json) -> dict[str, Slot]:
    slots = {
        path: Slot(slot.name.replace("mlp.", "feed_forward."), slot.transposed)
        for path, slot in usual_slots(layer, d_model).items()
    }
    for name, heads in (("q_proj", layer.n_heads), ("k_proj", layer.n_kv_heads)):
        turned = halves_of_pairs(layer.head_dim, heads=heads)
        kernel = f"self_attention/{name}/kernel"
        slots[kernel] = Slot(slots[kernel].name, transposed=True, part=turned)
    width = layer.expert_d_ff
    for number, name in enumerate(("gate_proj", "up_proj")):
        part = slice(number * width, (number + 1) * width)
        slots[f"mlp/experts/{name}"] = Slot(
            "feed_forward.experts.gate_up_proj", axis=2, part=part, of=2 * width
        )
    slots["mlp/experts/down_proj"] = Slot("feed_forward.experts.down_proj")
    slots["mlp/router/kernel"] = Slot("feed_forward.router.weight", transposed=True)
    for name in ("gate_proj", "up_proj", "down_proj"):
        slots[f"mlp/shared/{name}/kernel"] = Slot(f"feed_forward.shared_expert.{name}.weight", True)
    return slots


LLAMA4 = Family("llama4_text", "Llama4ForCausalLM", _read, _write, _slots, also=("llama4",))
