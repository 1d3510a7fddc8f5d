"""Llama 2 to 4, Mistral, Qwen 2 and 3, Mixtral and Phi-3."""

from ....plain_data import JsonObject
from ...transformer.config import TransformerConfig
from ...transformer.layer_config import LayerConfig
from ...transformer.layer_pattern import spell_pattern
from ..rope import read_rope, write_rope
from ..tensors import TensorSlice, halves_of_pairs, usual_tensors
from .family import (
    ConfigEntry,
    Family,
    Json,
    Table,
    balance_weight,
    mlp_tensors,
    read_entries,
    side_by_side,
    write_entries,
)

_MIXTRAL_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MIXTRAL: Table = (
    ConfigEntry("n_experts", "num_local_experts"),
    ConfigEntry("experts_per_token", "num_experts_per_tok"),
    balance_weight(0.01),
)
_QWEN3_MOE: Table = (
    ConfigEntry("experts_per_token", "num_experts_per_tok"),
    ConfigEntry("expert_d_ff", "moe_intermediate_size"),
    ConfigEntry("router_normalize", "norm_topk_prob", False, read=bool),
    balance_weight(0.001),
)
_LLAMA4: Table = (
    ConfigEntry("n_experts", "num_local_experts"),
    ConfigEntry("experts_per_token", "num_experts_per_tok", 1),
    ConfigEntry("expert_d_ff", "intermediate_size"),
    balance_weight(0.001),
)
_WITHOUT_EXPERTS = {"n_experts": 0, "experts_per_token": 0, "expert_d_ff": 0}
_CHUNKED = ("chunked", "dense_chunked")


def _read(data: Json) -> JsonObject:
    # transformers rotates whole heads in these families, even where a file has another share.
    return {**read_rope(data), "rope_share": 1.0}


def _write(config: TransformerConfig) -> JsonObject:
    rope = write_rope(config)
    scaled = config.rope_scaling is not None
    # transformers 4 reads the first two entries, transformers 5 the third.
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None,
        "rope_parameters": rope,
    }


def _read_windowed(data: Json) -> JsonObject:
    used = data.get("use_sliding_window", True)
    return {**_read(data), "sliding_window": data.get("sliding_window") if used else None}


def _write_windowed(config: TransformerConfig) -> JsonObject:
    window = config.sliding_window
    return {**_write(config), "sliding_window": window, "use_sliding_window": window is not None}


def _read_qwen2(data: Json) -> JsonObject:
    window = data.get("sliding_window") if data.get("use_sliding_window") else None
    fields = {**_read(data), "attention_bias": "qkv"}
    local = data["num_hidden_layers"] - data.get("max_window_layers", data["num_hidden_layers"])
    if window is None or local <= 0:
        return fields
    kinds = {"global": {}, "local": {"sliding_window": window}}
    before = f"{data['max_window_layers']} global then " if data["max_window_layers"] else ""
    return {**fields, "layer_kinds": kinds, "layer_pattern": f"{before}local"}


def _write_qwen2(config: TransformerConfig) -> JsonObject:
    return {**_write(config), "use_sliding_window": False, "sliding_window": None}


def _read_qwen3(data: Json) -> JsonObject:
    return {**_read_windowed({"use_sliding_window": False, **data}), "qk_norm": "head"}


def _read_mixtral(data: Json) -> JsonObject:
    return {**_read_windowed(data), **read_entries(_MIXTRAL, data)}


def _write_mixtral(config: TransformerConfig) -> JsonObject:
    return {
        **_write(config),
        "sliding_window": config.sliding_window,
        **write_entries(_MIXTRAL, config),
    }


def _mixtral_tensors(layer: LayerConfig, d_model: int, data: Json) -> dict[str, TensorSlice]:
    tensors = usual_tensors(layer, d_model)
    tensors["mlp/router/kernel"] = TensorSlice("block_sparse_moe.gate.weight", transposed=True)
    for ours, theirs in _MIXTRAL_EXPERT.items():
        name = f"block_sparse_moe.experts.{{expert}}.{theirs}.weight"
        tensors[f"mlp/experts/{ours}"] = TensorSlice(name, transposed=True)
    return tensors


def _read_qwen3_moe(data: Json) -> JsonObject:
    fields = {
        **_read_qwen3(data),
        "n_experts": data.get("num_local_experts") or data["num_experts"],
        **read_entries(_QWEN3_MOE, data),
    }
    step, dense = data.get("decoder_sparse_step", 1), data.get("mlp_only_layers") or ()
    order = [
        "dense" if number in dense or (number + 1) % step else "moe"
        for number in range(data["num_hidden_layers"])
    ]
    if "dense" not in order:
        return fields
    kinds = {"moe": {}, "dense": _WITHOUT_EXPERTS}
    return {**fields, "layer_kinds": kinds, "layer_pattern": spell_pattern(order)}


def _write_qwen3_moe(config: TransformerConfig) -> JsonObject:
    dense = [n for n, (_, layer) in enumerate(config.layers()) if not layer.n_experts]
    return {
        **_write_windowed(config),
        "num_experts": config.n_experts,
        "num_local_experts": config.n_experts,
        **write_entries(_QWEN3_MOE, config),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def _read_phi3(data: Json) -> JsonObject:
    return {**_read_windowed(data), **read_rope(data)}


def _write_phi3(config: TransformerConfig) -> JsonObject:
    scaling = config.rope_scaling
    original = config.max_seq_len if scaling is None else scaling.original_max_seq_len
    return {
        **_write(config),
        "sliding_window": config.sliding_window,
        "partial_rotary_factor": config.rope_share,
        "original_max_position_embeddings": original,
        # The default of transformers lies outside small vocabularies.
        "pad_token_id": None,
    }


def _phi3_tensors(layer: LayerConfig, d_model: int, data: Json) -> dict[str, TensorSlice]:
    tensors = usual_tensors(layer, d_model)
    heads, keys = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
    bounds = {"q_proj": (0, heads), "k_proj": (heads, heads + keys)}
    bounds["v_proj"] = (heads + keys, heads + 2 * keys)
    for name, (start, end) in bounds.items():
        tensors[f"self_attention/{name}/kernel"] = TensorSlice(
            "self_attn.qkv_proj.weight", True, part=slice(start, end), axis_size=heads + 2 * keys
        )
    paths = ("mlp/gate_proj/kernel", "mlp/up_proj/kernel")
    return tensors | side_by_side("mlp.gate_up_proj.weight", paths, layer.d_ff, transposed=True)


def _read_llama4(data: Json) -> JsonObject:
    count = data["num_hidden_layers"]
    rotated = data.get("no_rope_layers") or [
        (number + 1) % data.get("no_rope_layer_interval", 4) for number in range(count)
    ]
    step = data.get("interleave_moe_layer_step", 1)
    moe_layers = data.get("moe_layers") or list(range(step - 1, count, step))
    order = [
        ("" if number in moe_layers else "dense_") + ("chunked" if rotated[number] else "global")
        for number in range(count)
    ]
    chunked: JsonObject = {"attention_chunk": data.get("attention_chunk_size", 8192)}
    if data.get("use_qk_norm", True):
        chunked["qk_norm"] = "after_rope"
    unrotated: JsonObject = {"positions": "none"}
    if data.get("attn_temperature_tuning", True):
        unrotated["temperature_scale"] = data.get("attn_scale", 0.1)
        unrotated["temperature_floor"] = int(data.get("floor_scale", 8192))
    dense = {
        **_WITHOUT_EXPERTS,
        "shared_d_ff": 0,
        "router_score": "softmax",
        "weigh_inputs": False,
    }
    kinds = {
        "chunked": chunked,
        "global": unrotated,
        "dense_chunked": {**chunked, **dense},
        "dense_global": {**unrotated, **dense},
    }
    width = data["intermediate_size"]
    return {
        **read_rope(data),
        **read_entries(_LLAMA4, data),
        "d_ff": data.get("intermediate_size_mlp", width),
        "shared_d_ff": width,
        "router_score": "sigmoid",
        "router_normalize": False,
        "weigh_inputs": True,
        "layer_kinds": {kind: kinds[kind] for kind in kinds if kind in order},
        "layer_pattern": spell_pattern(order),
    }


def _write_llama4(config: TransformerConfig) -> JsonObject:
    order = config.layer_order
    chunked = next((config.kinds[kind] for kind in order if kind in _CHUNKED), config)
    unrotated = next((config.kinds[kind] for kind in order if kind not in _CHUNKED), config)
    return {
        "rope_parameters": write_rope(config),
        **write_entries(_LLAMA4, config),
        "intermediate_size_mlp": config.d_ff,
        "attention_chunk_size": chunked.attention_chunk,
        "use_qk_norm": chunked.qk_norm == "after_rope",
        "attn_temperature_tuning": unrotated.temperature_scale > 0,
        "attn_scale": unrotated.temperature_scale or 0.1,
        "floor_scale": unrotated.temperature_floor,
        "no_rope_layers": [int(kind in _CHUNKED) for kind in order],
        "layer_types": [
            "chunked_attention" if kind in _CHUNKED else "full_attention" for kind in order
        ],
        "moe_layers": [n for n, kind in enumerate(order) if not kind.startswith("dense")],
        "interleave_moe_layer_step": 1,
    }


def _llama4_tensors(layer: LayerConfig, d_model: int, data: Json) -> dict[str, TensorSlice]:
    tensors = {
        path: TensorSlice(tensor.name.replace("mlp.", "feed_forward."), tensor.transposed)
        for path, tensor in usual_tensors(layer, d_model).items()
    }
    for name, heads in (("q_proj", layer.n_heads), ("k_proj", layer.n_kv_heads)):
        kernel = f"self_attention/{name}/kernel"
        part = halves_of_pairs(layer.head_dim, heads=heads)
        tensors[kernel] = TensorSlice(tensors[kernel].name, transposed=True, part=part)
    paths = ("mlp/experts/gate_proj", "mlp/experts/up_proj")
    return {
        **tensors,
        **side_by_side("feed_forward.experts.gate_up_proj", paths, layer.expert_d_ff, axis=2),
        "mlp/experts/down_proj": TensorSlice("feed_forward.experts.down_proj"),
        "mlp/router/kernel": TensorSlice("feed_forward.router.weight", transposed=True),
        **mlp_tensors("mlp/shared", "feed_forward.shared_expert"),
    }


LLAMA = Family("llama", "LlamaForCausalLM", _read, _write)
MISTRAL = Family("mistral", "MistralForCausalLM", _read_windowed, _write_windowed)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen2)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_windowed)
MIXTRAL = Family("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral, _mixtral_tensors)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe)
PHI3 = Family("phi3", "Phi3ForCausalLM", _read_phi3, _write_phi3, _phi3_tensors)
LLAMA4 = Family(
    *("llama4_text", "Llama4ForCausalLM"),
    _read_llama4,
    _write_llama4,
    _llama4_tensors,
    also=("llama4",),
)
