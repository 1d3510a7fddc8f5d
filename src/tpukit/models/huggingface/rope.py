"""Rotary positions in `config.json`, in the entries of transformers 4 and 5."""

import math
from typing import Any

from ...errors import TPUModelError
from ...plain_data import JsonMapping, JsonObject
from ...rotary import RopeScaling
from ..transformer.layer_config import LayerConfig

_DEFAULT_THETA = 10_000.0
_KNOWN = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


def read_rope(data: JsonMapping, layer_type: str | None = None) -> JsonObject:
    """Return the rope fields of a layer.

    Args:
        data: The `config.json`.
        layer_type: The layer type, where layers have different settings.

    Raises:
        TPUModelError: The rope scaling is not supported.
    """
    # transformers 5 moved theta and scaling together into "rope_parameters".
    together = data.get("rope_parameters") or {}
    if layer_type in together:
        together = together[layer_type]
    scaling = together or data.get("rope_scaling") or {}
    theta = together.get("rope_theta") or data.get("rope_theta") or _DEFAULT_THETA
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _KNOWN:
        raise TPUModelError(
            f"rope scaling '{kind}' is not supported; supported are {', '.join(_KNOWN)}."
        )
    share = scaling.get("partial_rotary_factor") or data.get("partial_rotary_factor") or 1.0
    fields: JsonObject = {"rope_theta": float(theta), "rope_share": float(share)}
    if kind == "proportional":
        fields["rope_spread"] = share < 1
    elif kind != "default":
        fields["rope_scaling"] = _scaling(kind, scaling, data)
    return fields


def write_rope(layer: LayerConfig) -> JsonObject:
    """Return the `rope_parameters` that `read_rope` reads back."""
    found: JsonObject = {"rope_type": "default", "rope_theta": layer.rope_theta}
    if layer.rope_share != 1:
        found["partial_rotary_factor"] = layer.rope_share
    if layer.rope_spread:
        found["rope_type"] = "proportional"
    s = layer.rope_scaling
    if s is None:
        return found
    found |= {"rope_type": s.kind, "factor": s.factor}
    if s.kind != "linear":
        found["original_max_position_embeddings"] = s.original_max_seq_len
    if s.kind == "llama3":
        found |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    if s.kind == "yarn":
        found |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
    if s.kind == "longrope":
        found |= {"short_factor": list(s.short_factors), "long_factor": list(s.long_factors)}
    if s.attention_factor is not None:
        found["attention_factor"] = s.attention_factor
    return found


def yarn_growth(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's scale of scores for contexts that are `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _scaling(kind: Any, scaling: JsonMapping, data: JsonMapping) -> RopeScaling:
    original = scaling.get("original_max_position_embeddings") or data.get(
        "original_max_position_embeddings", 8192
    )
    factor = scaling.get("factor") or data.get("max_position_embeddings", original) / original
    attention = scaling.get("attention_factor")
    weight, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if kind == "yarn" and attention is None and weight and of_all:
        attention = yarn_growth(factor, weight) / yarn_growth(factor, of_all)
    return RopeScaling(
        kind=kind,
        factor=float(factor),
        original_max_seq_len=original,
        low_freq_factor=scaling.get("low_freq_factor", 1.0),
        high_freq_factor=scaling.get("high_freq_factor", 4.0),
        beta_fast=scaling.get("beta_fast") or 32.0,
        beta_slow=scaling.get("beta_slow") or 1.0,
        truncate=scaling.get("truncate", True),
        attention_factor=attention,
        short_factors=tuple(scaling.get("short_factor", ())),
        long_factors=tuple(scaling.get("long_factor", ())),
    )
