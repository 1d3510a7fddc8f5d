"""Tokenizers: bytes (built in) or a Hugging Face tokenizer.json; and copies of their files."""

import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from ...errors import ConfigError, MissingExtraError, did_you_mean
from ...models.huggingface.config import (
    GENERATION_FILE,
    end_tokens,
    read_generation_config,
    with_end_tokens,
)
from ...plain_data import read_json, read_limited
from ...runtime.files import write_text
from .token_folder import MANIFEST, read_manifest

_MOST_BYTES = 256 << 20  # the largest published tokenizer.json has 37 MB
# Names of the token between documents, most specific first.
_END_NAMES = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]"),
    *("<|im_end|>", "<end_of_turn>"),
)


@runtime_checkable
class Tokenizer(Protocol):
    """Turns texts into token numbers and back."""

    @property
    def name(self) -> str:
        """The name in messages and manifests."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest possible token number plus 1."""
        ...

    @property
    def end_of_document(self) -> int | None:
        """The token that follows every document, if any."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token numbers of each text, without start and end of document."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token numbers."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """One token per byte of UTF-8, and 256 between documents; it needs no vocabulary file."""

    name: str = "bytes"
    vocab_size: int = 257
    end_of_document: int | None = 256

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [np.frombuffer(_without_surrogates(text).encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return text; invalid UTF-8 becomes �, and ends of documents are left out."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A `tokenizer.json` file, run by the `tokenizers` library on all cores."""

    name: str
    vocab_size: int
    end_of_document: int | None
    _tokenizer: Any = field(repr=False, compare=False)
    start_of_document: tuple[int, ...] = ()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return token numbers without the special tokens that are usually added to a text."""
        encodings = self._tokenizer.encode_batch_fast(
            [_without_surrogates(text) for text in texts], add_special_tokens=False
        )
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return text, with special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    @functools.cached_property
    def special_tokens(self) -> frozenset[int]:
        """Tokens that are not text, such as the end of a turn."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)


def load_tokenizer(tokenizer: "str | Path | Tokenizer", *, end: str | None = None) -> Tokenizer:
    """Load a tokenizer by name or file.

    Args:
        tokenizer: "bytes", a `tokenizer.json` file, a folder with one, or an object with the
            methods of `Tokenizer`.
        end: The token that ends a document, if the tokenizer does not define it.

    Raises:
        ConfigError: There is no such tokenizer, or no such end token.
    """
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    if str(tokenizer) == "bytes":
        return ByteTokenizer()
    path = Path(tokenizer).expanduser()
    # os.path, because methods of Path raise for a name that is too long.
    file = path / "tokenizer.json" if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise _unknown(str(tokenizer), path)
    return _from_file(file, end)


def start_of_document(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that a tokenizer puts before every document, such as Llama's BOS."""
    return getattr(tokenizer, "start_of_document", ())


def tokenizer_key(tokenizer: Tokenizer) -> str:
    """Return a hash of the tokenizer's output for a sample text."""
    probe = "The quick brown fox, 1234567890 jumps; def f(x):\n\treturn x ** 2 # Größe 東京 🙂"
    tokens = tokenizer.encode_batch([probe])[0].astype("<i8").tobytes()
    about = f"{tokenizer.name};{tokenizer.vocab_size};{tokenizer.end_of_document};"
    if starts := start_of_document(tokenizer):
        about += f"{starts};"
    return hashlib.blake2b(about.encode() + tokens, digest_size=8).hexdigest()


def _without_surrogates(text: str) -> str:
    """Return the text with � instead of lone surrogates, which tokenizers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _from_file(file: Path, end: str | None) -> HuggingFaceTokenizer:
    try:
        from tokenizers import Tokenizer as Implementation
    except ImportError:
        raise MissingExtraError("data", needed_for=str(file), module="tokenizers") from None
    try:
        content = read_limited(file, _MOST_BYTES).decode()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); check its permissions."
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{file} is not a tokenizer.json ({error}); convert a SentencePiece .model first, with "
            "transformers' AutoTokenizer.save_pretrained."
        ) from None
    try:
        implementation = Implementation.from_str(content)
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise ConfigError(f"{file} is not a tokenizer.json: {error}. Download it again.") from None
    implementation.no_padding()
    implementation.no_truncation()
    number = _end_number(implementation, file, end)
    name = file.parent.name if file.name == "tokenizer.json" else file.stem
    vocabulary = implementation.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    starts = _start_numbers(implementation, vocabulary)
    return HuggingFaceTokenizer(name, size, number, implementation, starts)


def _start_numbers(implementation: Any, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer's post-processor puts before a text."""
    for text in ("a", *itertools.islice(vocabulary, 8)):
        full = implementation.encode(text).ids
        bare = implementation.encode(text, add_special_tokens=False).ids
        before = next((n for n in range(len(full)) if full[n : n + len(bare)] == bare), None)
        if bare and before is not None:
            return tuple(full[:before])
    return ()


def _end_number(implementation: Any, file: Path, end: str | None) -> int | None:
    if end is not None:
        number = implementation.token_to_id(end)
        if number is None:
            raise ConfigError(
                f"{file} has no token '{end}'."
                + did_you_mean(end, implementation.get_vocab(with_added_tokens=True))
            )
        return number
    settings = file.with_name("tokenizer_config.json")
    if settings.is_file():
        end = _settings(settings).get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]  JSON
        if isinstance(end, str) and (number := implementation.token_to_id(end)) is not None:
            return number
    known = (implementation.token_to_id(name) for name in _END_NAMES)
    return next((number for number in known if number is not None), None)


def _settings(file: Path) -> dict[str, Any]:
    try:
        settings = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); download it again.") from None
    return cast("dict[str, Any]", settings) if isinstance(settings, dict) else {}


def _unknown(name: str, path: Path) -> ConfigError:
    nearby = [entry.name for entry in path.parent.glob("*.json")]
    return ConfigError(
        f"there is no tokenizer file '{name}', and tpukit downloads none. Give 'bytes', or the "
        "path "
        "of a tokenizer.json: 'hf download MODEL tokenizer.json --local-dir DIR' downloads one."
        + did_you_mean(path.name, nearby)
    )


TOKENIZER = "tokenizer.json"
# Files beside it in a Hugging Face folder: names of special tokens, and the chat template.
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
BYTES = "bytes"
_END_OF_TEXT = "<|endoftext|>"


def keep_tokenizer(tokenizer: str | Path | None, folder: Path) -> bool:
    """Copy a tokenizer's files into a folder; return whether any was copied.

    The generation_config.json beside the tokenizer is copied too, because it names the tokens that
    end a text.

    Args:
        tokenizer: "bytes", which is written as a tokenizer.json that other programs read; a
            tokenizer.json; or a folder with one.
        folder: The target folder; existing files are not replaced.
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
    """Add the generation settings of one folder to the generation_config.json of another.

    Args:
        source: The folder of a model or tokenizer, if any.
        folder: The target folder; existing entries stay.
        ends: More tokens that end a text.
    """
    path = None if source is None else Path(source).expanduser()
    theirs = {} if path is None or not os.path.isdir(path) else read_generation_config(path)
    own = read_generation_config(folder)
    merged = with_end_tokens({**theirs, **own}, (*end_tokens(theirs), *ends))
    if merged and merged != own:
        write_text(folder / GENERATION_FILE, json.dumps(merged, indent=2) + "\n")


def text_ends(tokenizer: Tokenizer, generation: Mapping[str, Any]) -> list[int]:
    """Return every token that ends a text, the tokenizer's own first."""
    own = () if tokenizer.end_of_document is None else (tokenizer.end_of_document,)
    return [*dict.fromkeys((*own, *end_tokens(generation)))]


def tokenizer_of(data: object, model: str | Path | None = None) -> str | None:
    """Return the tokenizer of data, as `load_tokenizer` takes it; None if unknown.

    Args:
        data: The data; prepared data name their tokenizer.
        model: The model folder whose tokenizer is used if the data name none.
    """
    if isinstance(data, str | Path):  # arrays and iterables do not name one
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
    """Return a tokenizer.json that encodes every text as `ByteTokenizer` does."""
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
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """Return the character of each byte in byte-level vocabularies, as GPT-2 defined them.

    Printable bytes of Latin-1 are their own character; the others follow from U+0100 on.
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]
