"""Text to token numbers: bytes, built in; or a tokenizer.json of Hugging Face."""

import functools
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from ...errors import ConfigError, MissingExtraError, did_you_mean
from ...plain_data import read_json, read_limited

_MOST_BYTES = 256 << 20  # the largest published tokenizer.json has 37 MB
# What models call the token between documents, most specific first.
_END_NAMES = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]"),
    *("<|im_end|>", "<end_of_turn>"),
)


@runtime_checkable
class Tokenizer(Protocol):
    """Turns texts into token numbers and back."""

    @property
    def name(self) -> str:
        """Its name in messages and manifests."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest token number there can be."""
        ...

    @property
    def end_of_document(self) -> int | None:
        """The token that follows every document; None: nothing does."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token numbers of each text, without start and end of document."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token numbers."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """A token for each byte of UTF-8, and 256 between documents. Needs no vocabulary file."""

    name: str = "bytes"
    vocab_size: int = 257
    end_of_document: int | None = 256

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text."""
        return [np.frombuffer(_whole(text).encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text; what is no UTF-8 shows as �, ends of documents are left out."""
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
        """Without the special tokens the tokenizer would add for a single text."""
        found = self._tokenizer.encode_batch_fast(
            [_whole(text) for text in texts], add_special_tokens=False
        )
        return [np.asarray(encoding.ids, np.uint32) for encoding in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text, special tokens included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    @functools.cached_property
    def special_tokens(self) -> frozenset[int]:
        """Tokens that are no text, such as the end of a turn."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)


def load_tokenizer(tokenizer: "str | Path | Tokenizer", *, end: str | None = None) -> Tokenizer:
    """A tokenizer from its name or file.

    Args:
        tokenizer: "bytes", a `tokenizer.json` file, a folder that holds one, or an object with
            the methods of `Tokenizer`.
        end: The token that ends a document, where the tokenizer does not say it.

    Raises:
        ConfigError: There is no such tokenizer, or no such end token.
    """
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    if str(tokenizer) == "bytes":
        return ByteTokenizer()
    path = Path(tokenizer).expanduser()
    # os.path, because methods of Path mind a name that is too long.
    file = path / "tokenizer.json" if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise _unknown(str(tokenizer), path)
    return _from_file(file, end)


def start_of_document(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that a tokenizer puts before every document, such as Llama's BOS."""
    return getattr(tokenizer, "start_of_document", ())


def tokenizer_key(tokenizer: Tokenizer) -> str:
    """Changes when the tokenizer would make other tokens, as far as a probe can tell."""
    probe = "The quick brown fox, 1234567890 jumps; def f(x):\n\treturn x ** 2 # Größe 東京 🙂"
    tokens = tokenizer.encode_batch([probe])[0].astype("<i8").tobytes()
    about = f"{tokenizer.name};{tokenizer.vocab_size};{tokenizer.end_of_document};"
    if starts := start_of_document(tokenizer):
        about += f"{starts};"
    return hashlib.blake2b(about.encode() + tokens, digest_size=8).hexdigest()


def _whole(text: str) -> str:
    """Return the text with � instead of halves of surrogate pairs, which no tokenizer takes."""
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
        raise ConfigError(f"{file} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise ConfigError(
            f"{file} is no tokenizer.json ({error}); a SentencePiece .model must be converted "
            "first, with transformers' AutoTokenizer.save_pretrained."
        ) from None
    try:
        implementation = Implementation.from_str(content)
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise ConfigError(f"{file} is no tokenizer.json: {error}.") from None
    implementation.no_padding()
    implementation.no_truncation()
    number = _end_number(implementation, file, end)
    name = file.parent.name if file.name == "tokenizer.json" else file.stem
    vocabulary = implementation.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    starts = _start_numbers(implementation, vocabulary)
    return HuggingFaceTokenizer(name, size, number, implementation, starts)


def _start_numbers(implementation: Any, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """The special tokens that the tokenizer's post-processor puts before a text."""
    for text in ("a", *itertools.islice(vocabulary, 8)):
        whole = implementation.encode(text).ids
        bare = implementation.encode(text, add_special_tokens=False).ids
        before = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), None)
        if bare and before is not None:
            return tuple(whole[:before])
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
        said = _settings(settings).get("eos_token")
        said = said.get("content") if isinstance(said, dict) else said  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]  JSON
        if isinstance(said, str) and (number := implementation.token_to_id(said)) is not None:
            return number
    known = (implementation.token_to_id(name) for name in _END_NAMES)
    return next((number for number in known if number is not None), None)


def _settings(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); download it again.") from None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _unknown(name: str, path: Path) -> ConfigError:
    nearby = [entry.name for entry in path.parent.glob("*.json")]
    return ConfigError(
        f"there is no tokenizer file '{name}', and none is downloaded. Give 'bytes', or the path "
        "of a tokenizer.json: 'hf download MODEL tokenizer.json --local-dir DIR' fetches one."
        + did_you_mean(path.name, nearby)
    )
