"""Read and write the `config.json` of Hugging Face models."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from ...errors import TPUModelError
from ..transformer.config import TransformerConfig
from .families import FAMILIES, Family

# What a checkpoint says nothing about: how the model is trained and run.
_OURS_ALONE = (
    *("name", "dtype", "param_dtype", "matmul", "embedding_lookup", "wide_gradients"),
    *("routing", "capacity_factor", "router_balance_weight", "layer_kinds", "layer_pattern"),
    "mtp_weight",
)
# What every configuration of transformers may say, and what says nothing of an architecture.
_OF_FILES = (
    *("transformers_version", "architectures", "dtype", "torch_dtype", "auto_map", "_name_or_path"),
    *("return_dict", "output_attentions", "output_hidden_states", "use_cache", "problem_type"),
    *("id2label", "label2id", "chunk_size_feed_forward", "is_encoder_decoder", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout"),
)


def config_from_huggingface(data: Mapping[str, Any]) -> TransformerConfig:
    """The transformer a `config.json` describes.

    Raises:
        TPUModelError: The architecture, or an option of it, is not one the reference model has.
    """
    return family_of(data).config(text_part(data))


def text_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries about the decoder, where a model has other parts beside it."""
    inner = data.get("text_config")
    if not isinstance(inner, Mapping):
        return data
    return {"tie_word_embeddings": data.get("tie_word_embeddings", True), **inner}  # pyright: ignore[reportUnknownVariableType]  JSON


def family_of(data: Mapping[str, Any]) -> Family:
    """The family that a `config.json` is of.

    Raises:
        TPUModelError: None of the known ones; with what it has that the nearest has not.
    """
    model_type = str(text_part(data).get("model_type", data.get("model_type")))
    for family in FAMILIES:
        if model_type in (family.model_type, *family.also):
            return family
    raise TPUModelError(_nearest(model_type, text_part(data)))


def config_to_huggingface(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_huggingface` reads back."""
    return family_for(config).json(config)


def family_for(config: TransformerConfig) -> Family:
    """The family that can hold this transformer: what it writes, it reads back as the same.

    Raises:
        TPUModelError: There is none; with what the nearest would change.
    """
    nearest: tuple[int, str] = (1 << 30, "")
    for family in FAMILIES:
        try:
            lost = _differences(config, family.config(family.json(config)))
        except (TPUModelError, KeyError, TypeError, ArithmeticError):
            continue
        if not lost:
            return family
        nearest = min(nearest, (len(lost), f"'{family.model_type}' has no {' and no '.join(lost)}"))
    raise TPUModelError(
        f"'{config.name}' cannot be written as Hugging Face weights: of the types known here, the "
        f"nearest, {nearest[1]}. Save it as a checkpoint instead."
    )


def _differences(ours: TransformerConfig, read: TransformerConfig) -> list[str]:
    """What of ours is not in what was read back, by field."""
    lost: list[str] = []
    for field in dataclasses.fields(ours):
        if field.name in _OURS_ALONE:
            continue
        if getattr(ours, field.name) != getattr(read, field.name) and not ours.layer_kinds:
            lost.append(f"{field.name}={getattr(ours, field.name)!r}")
    pairs = zip(ours.layers(), read.layers(), strict=False)
    for (_, one), (_, other) in pairs:
        for field in dataclasses.fields(one):
            seen = getattr(one, field.name)
            if field.name in _OURS_ALONE or _same(seen, getattr(other, field.name)):
                continue
            text = f"{field.name}={seen!r}"
            lost += [] if text in lost else [text]
    outside = ("logit_soft_cap", "scale_embeddings", "tied_embeddings", "max_seq_len", "mtp_layers")
    for name in outside:
        if getattr(ours, name) != getattr(read, name) and ours.layer_kinds:
            lost.append(f"{name}={getattr(ours, name)!r}")
    return lost


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-6 * abs(one)
    return one == other


def _nearest(model_type: str, data: Mapping[str, Any]) -> str:
    """What to say of a type that is not known."""
    known = [name for family in FAMILIES for name in (family.model_type, *family.also)]

    def strange(family: Family) -> list[str]:
        try:
            written = family.json(family.config(data))
        except (TPUModelError, KeyError, TypeError, ValueError):
            return list(data)
        return [key for key in data if key not in written and key not in _OF_FILES]

    found = difflib.get_close_matches(model_type, known, n=1, cutoff=0.0)[0]
    by_name = next(f for f in FAMILIES if found in (f.model_type, *f.also))
    nearest = min((by_name, *FAMILIES), key=lambda family: len(strange(family)))
    extra = [key for key in strange(nearest) if data[key] not in (None, False, 0, [], {})]
    return (
        f"Hugging Face model_type '{model_type}' is not supported; the nearest is "
        f"'{nearest.model_type}', which does not know {', '.join(extra[:8]) or 'its name'}. "
        f"Supported are {', '.join(known)}."
    )
