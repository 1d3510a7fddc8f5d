"""Llama, Mistral, Qwen 2 and 3, Mixtral and Phi: one kind of layer, with small differences."""

from typing import Any

from ...transformer.config import TransformerConfig
from ...transformer.layer_config import LayerConfig
from ..rope import read_rope, write_rope
from ..slots import usual_slots
from ..tensors import Slot
from .family import Family, Json

_MIXTRAL_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _read(data: Json) -> dict[str, Any]:
    # Whatever a file says, transformers rotates whole heads in these types.
    return {**read_rope(data), "rope_share": 1.0}


def _read_windowed(data: Json) -> dict[str, Any]:
    used = data.get("use_sliding_window", True)
    return {**_read(data), "sliding_window": data.get("sliding_window") if used else None}


def _read_phi3(data: Json) -> dict[str, Any]:
    return {**_read_windowed(data), **read_rope(data)}


def _write(config: TransformerConfig) -> dict[str, Any]:
    rope = write_rope(config)
    scaled = config.rope_scaling is not None
    # Readers of transformers 4 know these two, those of 5 the next.
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None,
        "rope_parameters": rope,
    }


def _write_windowed(config: TransformerConfig) -> dict[str, Any]:
    window = config.sliding_window
    return {**_write(config), "sliding_window": window, "use_sliding_window": window is not None}


def _read_qwen2(data: Json) -> dict[str, Any]:
    window = data.get("sliding_window") if data.get("use_sliding_window") else None
    fields = {**_read(data), "attention_bias": "qkv"}
    local = data["num_hidden_layers"] - data.get("max_window_layers", data["num_hidden_layers"])
    if window is None or local <= 0:
        return fields
    kinds = {"global": {}, "local": {"sliding_window": window}}
    before = f"{data['max_window_layers']} global then " if data["max_window_layers"] else ""
    return {**fields, "layer_kinds": kinds, "layer_pattern": f"{before}local"}


def _write_qwen2(config: TransformerConfig) -> dict[str, Any]:
    return {**_write(config), "use_sliding_window": False, "sliding_window": None}


def _read_qwen3(data: Json) -> dict[str, Any]:
    return {**_read_windowed({"use_sliding_window": False, **data}), "qk_norm": "head"}


def _read_mixtral(data: Json) -> dict[str, Any]:
    return {
        **_read_windowed(data),
        "n_experts": data["num_local_experts"],
        "experts_per_token": data["num_experts_per_tok"],
        "router_balance_weight": data.get("router_aux_loss_coef", 0.01),
    }


def _write_mixtral(config: TransformerConfig) -> dict[str, Any]:
    return {
        **_write(config),
        "sliding_window": config.sliding_window,
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.router_balance_weight,
    }


def _mixtral_slots(layer: LayerConfig, d_model: int, data: Json) -> dict[str, Slot]:
    slots = usual_slots(layer, d_model)
    slots["mlp/router/kernel"] = Slot("block_sparse_moe.gate.weight", transposed=True)
    for ours, theirs in _MIXTRAL_EXPERT.items():
        name = f"block_sparse_moe.experts.{{expert}}.{theirs}.weight"
        slots[f"mlp/experts/{ours}"] = Slot(name, transposed=True)
    return slots


def _read_qwen3_moe(data: Json) -> dict[str, Any]:
    fields = {
        **_read_qwen3(data),
        "n_experts": data.get("num_local_experts") or data["num_experts"],
        "experts_per_token": data["num_experts_per_tok"],
        "expert_d_ff": data["moe_intermediate_size"],
        "router_normalize": bool(data.get("norm_topk_prob", False)),
        "router_balance_weight": data.get("router_aux_loss_coef", 0.001),
    }
    return fields | dense_layers(data)


def dense_layers(data: Json, *, kind: str = "moe") -> dict[str, Any]:
    """Kinds and pattern where some layers of a Qwen model have no experts."""
    step, dense = data.get("decoder_sparse_step", 1), data.get("mlp_only_layers") or ()
    order = [
        "dense" if number in dense or (number + 1) % step else kind
        for number in range(data["num_hidden_layers"])
    ]
    if "dense" not in order:
        return {}
    from ...transformer.layer_pattern import spell_pattern

    kinds = {kind: {}, "dense": {"n_experts": 0, "experts_per_token": 0, "expert_d_ff": 0}}
    return {"layer_kinds": kinds, "layer_pattern": spell_pattern(order)}


def _write_qwen3_moe(config: TransformerConfig) -> dict[str, Any]:
    dense = [n for n, (_, layer) in enumerate(config.layers()) if not layer.n_experts]
    return {
        **_write_windowed(config),
        "num_experts": config.n_experts,
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_d_ff,
        "norm_topk_prob": config.router_normalize,
        "router_aux_loss_coef": config.router_balance_weight,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def _phi3_slots(layer: LayerConfig, d_model: int, data: Json) -> dict[str, Slot]:
    slots = usual_slots(layer, d_model)
    heads, keys = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
    ends = {"q_proj": (0, heads), "k_proj": (heads, heads + keys)}
    ends["v_proj"] = (heads + keys, heads + 2 * keys)
    for name, (start, end) in ends.items():
        slots[f"self_attention/{name}/kernel"] = Slot(
            "self_attn.qkv_proj.weight", True, part=slice(start, end), of=heads + 2 * keys
        )
    for number, name in enumerate(("gate_proj", "up_proj")):
        part = slice(number * layer.d_ff, (number + 1) * layer.d_ff)
        slots[f"mlp/{name}/kernel"] = Slot(
            "mlp.gate_up_proj.weight", True, part=part, of=2 * layer.d_ff
        )
    return slots


def _write_phi3(config: TransformerConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    original = config.max_seq_len if scaling is None else scaling.original_max_seq_len
    return {
        **_write(config),
        "sliding_window": config.sliding_window,
        "partial_rotary_factor": config.rope_share,
        "original_max_position_embeddings": original,
        "pad_token_id": None,  # transformers puts it past small vocabularies otherwise
    }


LLAMA = Family("llama", "LlamaForCausalLM", _read, _write)
MISTRAL = Family("mistral", "MistralForCausalLM", _read_windowed, _write_windowed)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen2)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_windowed)
MIXTRAL = Family("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral, _mixtral_slots)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe)
PHI3 = Family("phi3", "Phi3ForCausalLM", _read_phi3, _write_phi3, _phi3_slots)
