"""The `generation_config.json` of Hugging Face folders: which tokens begin, end and pad a text."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from .config import text_part
from .files import read_json

GENERATION_FILE = "generation_config.json"
# Entries that older folders have in their config.json alone.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """Return the entries of a folder's generation_config.json; empty where there are none.

    Token ids that the file lacks are taken from config.json beside it.

    Raises:
        TPUModelError: One of the files is not JSON.
    """
    own, model = (_read(Path(folder) / name) for name in (GENERATION_FILE, "config.json"))
    model = {**model, **text_part(model)}
    missing = [key for key in TOKEN_IDS if own.get(key) is None and model.get(key) is not None]
    return {**own, **{key: model[key] for key in missing}}


def end_tokens(generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of all tokens that end a text."""
    found = generation.get("eos_token_id")
    listed = cast("list[Any]", found if isinstance(found, list) else [found])
    return tuple(one for one in listed if type(one) is int)


def with_end_tokens(generation: Mapping[str, Any], ends: Iterable[int]) -> dict[str, Any]:
    """Return the entries with these end tokens added; a single one is a number, not a list."""
    every = [*dict.fromkeys((*end_tokens(generation), *ends))]
    if not every:
        return dict(generation)
    return {**generation, "eos_token_id": every[0] if len(every) == 1 else every}


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
