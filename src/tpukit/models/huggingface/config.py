"""Read and write the `config.json` and `generation_config.json` of Hugging Face folders."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from ...errors import TPUModelError
from ...plain_data import JsonMapping, JsonObject
from ..transformer.config import TransformerConfig
from .families import FAMILIES, Family
from .files import read_json

# Fields that a checkpoint does not have, because they concern training and execution.
_OURS_ALONE = (
    *("name", "dtype", "param_dtype", "matmul", "embedding_lookup", "wide_gradients"),
    *("routing", "capacity_factor", "router_balance_weight", "layer_kinds", "layer_pattern"),
    "mtp_weight",
)
# Entries of any configuration of transformers that do not describe the architecture.
_OF_FILES = (
    *("transformers_version", "architectures", "dtype", "torch_dtype", "auto_map", "_name_or_path"),
    *("return_dict", "output_attentions", "output_hidden_states", "use_cache", "problem_type"),
    *("id2label", "label2id", "chunk_size_feed_forward", "is_encoder_decoder", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout"),
)


def config_from_huggingface(data: JsonMapping) -> TransformerConfig:
    """Return the transformer that a `config.json` describes.

    Raises:
        TPUModelError: The architecture or one of its options is not supported.
    """
    return family_of(data).config(text_part(data))


def text_part(data: JsonMapping) -> JsonMapping:
    """Return the entries of the decoder, which multimodal models have in `text_config`."""
    inner = data.get("text_config")
    if not isinstance(inner, Mapping):
        return data
    return {"tie_word_embeddings": data.get("tie_word_embeddings", True), **inner}  # pyright: ignore[reportUnknownVariableType]  JSON


def family_of(data: JsonMapping) -> Family:
    """Return the family of a `config.json`.

    Raises:
        TPUModelError: The family is unknown; the message names the nearest and its missing entries.
    """
    model_type = str(text_part(data).get("model_type", data.get("model_type")))
    for family in FAMILIES:
        if model_type in (family.model_type, *family.also):
            return family
    raise TPUModelError(_nearest(model_type, text_part(data)))


def config_to_huggingface(config: TransformerConfig) -> JsonObject:
    """Return the `config.json` that `config_from_huggingface` reads back."""
    return family_for(config).json(config)


def family_for(config: TransformerConfig) -> Family:
    """Return the family that writes this transformer and reads it back unchanged.

    Raises:
        TPUModelError: There is none; the message names what the nearest family would change.
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
        f"'{config.name}' cannot be written as Hugging Face weights; of the supported types, the "
        f"nearest, {nearest[1]}. Save it as a checkpoint instead."
    )


def _differences(ours: TransformerConfig, read: TransformerConfig) -> list[str]:
    """Return the fields that differ after writing and reading, as texts."""
    lost: list[str] = []
    for field in dataclasses.fields(ours):
        if field.name in _OURS_ALONE:
            continue
        if getattr(ours, field.name) != getattr(read, field.name) and not ours.layer_kinds:
            lost.append(f"{field.name}={getattr(ours, field.name)!r}")
    pairs = zip(ours.layers(), read.layers(), strict=False)
    for (_, layer), (_, other) in pairs:
        for field in dataclasses.fields(layer):
            seen = getattr(layer, field.name)
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


def _nearest(model_type: str, data: JsonMapping) -> str:
    """Return the error message for an unknown model type."""
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
        f"'{nearest.model_type}', which has no {', '.join(extra[:8]) or 'such name'}. "
        f"Supported are {', '.join(known)}."
    )


GENERATION_FILE = "generation_config.json"
# Entries that older folders have in config.json only.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_generation_config(folder: str | Path) -> JsonObject:
    """Return the entries of a folder's generation_config.json; empty without the file.

    Token ids that the file lacks are taken from config.json beside it.

    Raises:
        TPUModelError: One of the files is not JSON.
    """
    own, model = (_read(Path(folder) / name) for name in (GENERATION_FILE, "config.json"))
    model = {**model, **text_part(model)}
    missing = [key for key in TOKEN_IDS if own.get(key) is None and model.get(key) is not None]
    return {**own, **{key: model[key] for key in missing}}


def end_tokens(generation: JsonMapping) -> tuple[int, ...]:
    """Return the ids of all tokens that end a text."""
    ids = generation.get("eos_token_id")
    listed = cast("list[Any]", ids if isinstance(ids, list) else [ids])
    return tuple(token for token in listed if type(token) is int)


def with_end_tokens(generation: JsonMapping, ends: Iterable[int]) -> JsonObject:
    """Return the entries with end tokens added; a single token is a number, not a list."""
    every = [*dict.fromkeys((*end_tokens(generation), *ends))]
    if not every:
        return dict(generation)
    return {**generation, "eos_token_id": every[0] if len(every) == 1 else every}


def _read(path: Path) -> JsonObject:
    return read_json(path) if path.is_file() else {}
