"""A tokenizer's own files, kept beside what was made with it: data, runs, exported models."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...models.huggingface.generation_config import (
    GENERATION_FILE,
    end_tokens,
    read_generation_config,
    with_end_tokens,
)
from ...runtime.files import write_text
from .manifest import MANIFEST, read_manifest
from .tokenizer import ByteTokenizer, Tokenizer

TOKENIZER = "tokenizer.json"
# What Hugging Face keeps beside it: names of special tokens, and how conversations are written.
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
BYTES = "bytes"
_END_OF_TEXT = "<|endoftext|>"


def keep_tokenizer(tokenizer: str | Path | None, folder: Path) -> bool:
    """Copy a tokenizer's files into a folder, and tell whether there was anything to copy.

    The generation_config.json beside the tokenizer goes along, because it names the tokens that
    end a text.

    Args:
        tokenizer: "bytes", which is written as a tokenizer.json that other programs read; a
            tokenizer.json; or a folder that holds one.
        folder: Where the files go; nothing there is replaced.
    """
    if tokenizer is None or os.path.exists(folder / TOKENIZER):
        return False
    if str(tokenizer) == BYTES:
        write_text(folder / TOKENIZER, json.dumps(_bytes_as_json(), ensure_ascii=False, indent=1))
        return True
    path = Path(tokenizer).expanduser()
    file = path / TOKENIZER if os.path.isdir(path) else path
    if not os.path.isfile(file):
        return False
    shutil.copyfile(file, folder / TOKENIZER)
    for name in _BESIDE:
        if (file.parent / name).is_file() and not (folder / name).exists():
            shutil.copyfile(file.parent / name, folder / name)
    keep_generation_config(file.parent, folder)
    return True


def keep_generation_config(
    source: str | Path | None, folder: Path, ends: Iterable[int] = ()
) -> None:
    """Write what a folder says about generation as the generation_config.json of another.

    Args:
        source: The folder of a model or tokenizer; None for none.
        folder: Where the file goes; entries that are there stay.
        ends: Further tokens that end a text.
    """
    path = None if source is None else Path(source).expanduser()
    theirs = {} if path is None or not os.path.isdir(path) else read_generation_config(path)
    own = read_generation_config(folder)
    found = with_end_tokens({**theirs, **own}, (*end_tokens(theirs), *ends))
    if found and found != own:
        write_text(folder / GENERATION_FILE, json.dumps(found, indent=2) + "\n")


def text_ends(tokenizer: Tokenizer, generation: Mapping[str, Any]) -> list[int]:
    """Return every token that ends a text, the tokenizer's own first."""
    own = () if tokenizer.end_of_document is None else (tokenizer.end_of_document,)
    return [*dict.fromkeys((*own, *end_tokens(generation)))]


def tokenizer_of(data: object, model: str | Path | None = None) -> str | None:
    """Return what data were made into tokens with, as `load_tokenizer` takes it; None if unknown.

    Args:
        data: Prepared data name their tokenizer.
        model: The folder whose tokenizer is meant where the data name none.
    """
    if isinstance(data, str | Path):  # arrays and iterables say nothing of it
        manifest = Path(data).expanduser() / MANIFEST
        if os.path.isfile(manifest):
            made = read_manifest(manifest.read_bytes(), name=str(manifest)).tokenizer
            if made.get("name") == BYTES:
                return BYTES
            if os.path.isfile(kept := manifest.with_name(TOKENIZER)):
                return str(kept)
    if model is None or not os.path.isfile(beside := Path(model).expanduser() / TOKENIZER):
        return None
    return str(beside)


def _bytes_as_json() -> dict[str, object]:
    """`ByteTokenizer` in the format of the `tokenizers` library: the same numbers for any text."""
    end = ByteTokenizer().end_of_document
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": end,
                "content": _END_OF_TEXT,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            "vocab": {letter: byte for byte, letter in enumerate(_letters_of_bytes())},
            "merges": [],
        },
    }


def _letters_of_bytes() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies, as GPT-2 chose them.

    Bytes that print as a letter of Latin-1 are that letter, the others follow from U+0100 on.
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]
