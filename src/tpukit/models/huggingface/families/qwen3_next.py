"""Qwen3-Next: three gated delta layers per gated attention layer, all with experts."""

from ....plain_data import JsonObject
from ...transformer.config import TransformerConfig
from ...transformer.layer_config import LayerConfig
from ...transformer.layer_pattern import spell_pattern
from ..rope import read_rope, write_rope
from ..tensors import TensorSlice, in_blocks, usual_tensors
from .family import (
    ConfigEntry,
    Family,
    Json,
    Table,
    balance_weight,
    kinds_by_type,
    mlp_tensors,
    read_entries,
    write_entries,
)

_KINDS = {"linear_attention": "linear", "full_attention": "full"}
_TYPES = {kind: layer_type for layer_type, kind in _KINDS.items()}
_DELTA: Table = (
    ConfigEntry("key_heads", "linear_num_key_heads"),
    ConfigEntry("value_heads", "linear_num_value_heads"),
    ConfigEntry("key_dim", "linear_key_head_dim"),
    ConfigEntry("value_dim", "linear_value_head_dim"),
    ConfigEntry("convolution", "linear_conv_kernel_dim", 4),
)
_EXPERTS: Table = (
    ConfigEntry("n_experts", "num_experts"),
    ConfigEntry("experts_per_token", "num_experts_per_tok"),
    ConfigEntry("expert_d_ff", "moe_intermediate_size"),
    ConfigEntry("shared_d_ff", "shared_expert_intermediate_size"),
    ConfigEntry("router_normalize", "norm_topk_prob", True, read=bool),
    balance_weight(0.001),
)


def _read(data: Json) -> JsonObject:
    kinds = kinds_by_type(data, _KINDS, default="full_attention")
    if not data.get("layer_types"):
        step = data.get("full_attention_interval", 4)
        kinds = ["full" if (n + 1) % step == 0 else "linear" for n in range(len(kinds))]
    return {
        **read_rope(data),
        **read_entries(_EXPERTS, data),
        "norm_offset": True,
        "shared_gate": True,
        "layer_kinds": {
            "linear": {"delta": read_entries(_DELTA, data)},
            "full": {"attention_gate": True, "qk_norm": "head"},
        },
        "layer_pattern": spell_pattern(kinds),
    }


def _write(config: TransformerConfig) -> JsonObject:
    delta = next((layer.delta for _, layer in config.layers() if layer.delta), None)
    if delta is None:
        return {}
    return {
        "rope_parameters": write_rope(config),
        "partial_rotary_factor": config.rope_share,
        **write_entries(_EXPERTS, config),
        **write_entries(_DELTA, delta),
        "layer_types": [_TYPES.get(kind, "full_attention") for kind in config.layer_order],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _tensors(layer: LayerConfig, d_model: int, data: Json) -> dict[str, TensorSlice]:
    return {
        **usual_tensors(layer, d_model),
        **mlp_tensors("mlp/shared", "mlp.shared_expert"),
        "mlp/shared_gate/kernel": TensorSlice("mlp.shared_expert_gate.weight", True),
        **(_attention(layer) if layer.delta is None else _delta(layer)),
    }


def _attention(layer: LayerConfig) -> dict[str, TensorSlice]:
    """Return queries and gates, of which the checkpoint alternates heads."""
    parts = in_blocks(layer.n_heads, {"q_proj": layer.head_dim, "g_proj": layer.head_dim})
    size = 2 * layer.n_heads * layer.head_dim
    return {
        f"self_attention/{name}/kernel": TensorSlice(
            "self_attn.q_proj.weight", True, part=part, axis_size=size
        )
        for name, part in parts.items()
    }


def _delta(layer: LayerConfig) -> dict[str, TensorSlice]:
    """Return q, k, v and z, which the checkpoint groups by key head, as it does b and a."""
    d = layer.delta
    assert d is not None
    each = d.value_heads // d.key_heads
    values = each * d.value_dim
    wide = {"q_proj": d.key_dim, "k_proj": d.key_dim, "v_proj": values, "z_proj": values}
    tensors: dict[str, TensorSlice] = {}
    for stored, sizes in (("in_proj_qkvz", wide), ("in_proj_ba", {"b_proj": each, "a_proj": each})):
        size = d.key_heads * sum(sizes.values())
        for name, part in in_blocks(d.key_heads, sizes).items():
            tensors[f"delta_attention/{name}/kernel"] = TensorSlice(
                f"linear_attn.{stored}.weight", True, part=part, axis_size=size
            )
    keys = d.key_heads * d.key_dim
    channels = 2 * keys + d.value_heads * d.value_dim
    ends = {"q": (0, keys), "k": (keys, 2 * keys), "v": (2 * keys, channels)}
    for name, (start, end) in ends.items():
        tensors[f"delta_attention/{name}_conv/kernel"] = TensorSlice(
            "linear_attn.conv1d.weight", part=slice(start, end), axis_size=channels, unit_axis=True
        )
    tensors["delta_attention/a_log"] = TensorSlice("linear_attn.A_log")
    tensors["delta_attention/dt_bias"] = TensorSlice("linear_attn.dt_bias")
    tensors["delta_attention/norm/scale"] = TensorSlice("linear_attn.norm.weight")
    tensors["delta_attention/o_proj/kernel"] = TensorSlice(
        "linear_attn.out_proj.weight", transposed=True
    )
    return tensors


QWEN3_NEXT = Family("qwen3_next", "Qwen3NextForCausalLM", _read, _write, _tensors)
