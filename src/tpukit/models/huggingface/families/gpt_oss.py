"""GPT-OSS: sinks, biases everywhere, and experts with a clamped gate."""

from typing import Any

import numpy as np

from ...transformer.config import TransformerConfig
from ...transformer.layer_config import LayerConfig
from ...transformer.layer_pattern import spell_pattern
from ..rope import read_rope, write_rope
from ..slots import usual_slots
from ..tensors import Slot
from .family import Family, Json, kind_of_types
from .gemma import LOCAL_AND_GLOBAL, TYPES


def _read(data: Json) -> dict[str, Any]:
    types = kind_of_types(data, LOCAL_AND_GLOBAL, default="full_attention")
    if not data.get("layer_types"):
        types = ["global" if number % 2 else "local" for number in range(len(types))]
    return {
        **read_rope(data),
        "attention_bias": "qkvo" if data.get("attention_bias", True) else None,
        "attention_sinks": True,
        "activation": "clamped_swiglu",
        "n_experts": data["num_local_experts"],
        "experts_per_token": data["num_experts_per_tok"],
        "expert_bias": True,
        "router_bias": True,
        "router_balance_weight": data.get("router_aux_loss_coef", 0.9),
        "layer_kinds": {"local": {"sliding_window": data.get("sliding_window", 128)}, "global": {}},
        "layer_pattern": spell_pattern(types),
    }


def _write(config: TransformerConfig) -> dict[str, Any]:
    local = config.kinds.get("local")
    return {
        "rope_parameters": write_rope(config),
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.router_balance_weight,
        "sliding_window": None if local is None else local.sliding_window,
        "layer_types": [TYPES.get(kind, "full_attention") for kind in config.layer_order],
        "swiglu_limit": 7.0,
    }


def _slots(layer: LayerConfig, d_model: int, data: Json) -> dict[str, Slot]:
    slots = usual_slots(layer, d_model)
    slots["mlp/router/kernel"] = Slot("mlp.router.weight", transposed=True)
    slots["mlp/router/bias"] = Slot("mlp.router.bias")
    width = layer.expert_d_ff
    for first, name in enumerate(("gate", "up")):
        part = np.arange(first, 2 * width, 2)  # a gate and its up stand side by side
        slots[f"mlp/experts/{name}_proj"] = Slot(
            "mlp.experts.gate_up_proj", axis=2, part=part, of=2 * width
        )
        slots[f"mlp/experts/{name}_bias"] = Slot(
            "mlp.experts.gate_up_proj_bias", axis=1, part=part, of=2 * width
        )
    slots["mlp/experts/down_proj"] = Slot("mlp.experts.down_proj")
    slots["mlp/experts/down_bias"] = Slot("mlp.experts.down_proj_bias")
    return slots


GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", _read, _write, _slots)
