"""`open_data`: training data of any kind as batches for this process."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from ...errors import ConfigError, TPUValidationError, did_you_mean
from ...runtime.files import cache_folder, private_folder
from .examples import StoredData, vocabulary_overflow
from .indexed import NUM_WORKERS, PREFETCH, IndexedData
from .iterated import BatchIterable, IteratedData
from .locations import DataKind, Location, kind_of, open_location
from .prepare import prepare_tokens
from .sources import named_data
from .stream import DataDescription, DataStream
from .tables import ArrayTable, ExampleShape, ImageTable, TableData
from .token_folder import (
    ANSWERS,
    DOCUMENTS,
    MANIFEST,
    DataManifest,
    check_answers,
    check_documents,
    check_shards,
    read_manifest,
)
from .token_store import ArrayShard, TokenShard, TokenStore, check_token_dtype
from .tokenizer import Tokenizer, load_tokenizer, tokenizer_key

PACKINGS = ("concat", "documents")
_FILES_AT_ONCE = 16


DataSource: TypeAlias = str | Path | np.ndarray | ArrayTable | ImageTable | BatchIterable


class TokenData(Protocol):
    """Data that a trainer can draw batches from."""

    def describe(self) -> DataDescription:
        """Return a description of the data."""
        ...

    def stream(self) -> DataStream:
        """Return a stream of batches from the start."""
        ...


def open_data(
    source: DataSource,
    *,
    sequence_length: int | None,
    batch_size: int,
    vocab_size: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    tokenizer: str | Path | Tokenizer | None = None,
    text_key: str = "text",
    packing: Literal["concat", "documents"] = "concat",
    dtype: str | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
    num_epochs: int | None = None,
    num_workers: int = NUM_WORKERS,
    prefetch: int = PREFETCH,
    shapes: Mapping[str, ExampleShape] | None = None,
) -> TokenData:
    """Open training data.

    Args:
        source: A token file (.npy, .bin) or a folder of them; a folder of `tpukit data prepare`;
            text (.txt, .jsonl, ArrayRecord, a Hugging Face data set on disk); any of these at
            gs://…; an array of tokens; an iterable of batches or a function that starts one;
            "file.py:function"; an .npz file of arrays with one row per example; or a folder of
            images with a subfolder per class.
        sequence_length: Tokens per example; None is for iterables only.
        batch_size: Examples per batch, over all processes.
        vocab_size: Tokens from this number on are refused: at once if the largest token is known
            (prepared data), otherwise with the batch that contains one.
        seed: Seed of the shuffle.
        shuffle: Whether the order of examples differs each epoch; for tokens and text only.
        tokenizer: For text, see `load_tokenizer`. The tokens are kept in the cache folder.
        text_key: The field with the text or token numbers, for records with fields.
        packing: "concat" cuts all documents every `sequence_length` tokens; "documents" puts
            documents side by side and adds segment_ids and positions.
        dtype: Element type of .bin files; by default that of their names (x.uint32.bin), or
            uint16.
        process_index: The process whose rows are read; this one by default.
        process_count: Number of processes.
        num_epochs: Passes over the data; None is endless.
        num_workers: Threads that read tokens ahead; iterables are not read ahead.
        prefetch: Number of reads ahead of the consumer.
        shapes: The entries of an example that a model reads; arrays and images are converted to
            them. By default all entries, unchanged.

    Raises:
        TPUValidationError: The data are missing, damaged, too few or do not fit the model.
        ConfigError: A setting is wrong, or a bucket may not be read.

    Example:
        >>> data = open_data(np.arange(1000), sequence_length=16, batch_size=4)
        >>> next(data.stream())["inputs"].shape
        (4, 16)
    """
    if process_index is None or process_count is None:
        import jax

        process_index, process_count = jax.process_index(), jax.process_count()
    _check_settings(batch_size, seed, packing, process_index, process_count, num_epochs)
    order: dict[str, Any] = {
        "batch_size": batch_size,
        "process_index": process_index,
        "process_count": process_count,
    }
    source = as_array(named_data(source, seed=seed, **order))
    order["num_epochs"] = num_epochs
    indexed: dict[str, Any] = {
        **order,
        "seed": seed,
        "shuffle": shuffle,
        "num_workers": num_workers,
        "prefetch": prefetch,
    }
    if isinstance(source, ArrayTable | ImageTable):
        table = source if shapes is None else source.fitted(shapes)
        data = TableData(table=table, **indexed)
        return _with_batches(data, f"{len(source)} examples")
    if not isinstance(source, str | Path | np.ndarray):
        return IteratedData(
            source=source, sequence_length=sequence_length, vocab_size=vocab_size, **order
        )
    if sequence_length is None or sequence_length < 1:
        where = "the array" if isinstance(source, np.ndarray) else open_location(source).path
        raise ConfigError(
            f"{where} is read as tokens, but sequence_length is {sequence_length}: give 1 or more; "
            "or, for a model that reads no tokens, an .npz file, a folder with a folder of images "
            "per class, or file.py:function."
        )
    store = open_tokens(source, tokenizer=tokenizer, text_key=text_key, dtype=dtype)
    _check_content(store, vocab_size)
    data = StoredData(
        store=store,
        sequence_length=sequence_length,
        vocab_size=vocab_size,
        packing=packing,
        **indexed,
    )
    if len(data.examples) == 0:
        raise TPUValidationError(
            f"{store.path} has {store.num_tokens} tokens, fewer than one example of "
            f"sequence_length={sequence_length} and the token after it; shorten the sequence or "
            "add data."
        )
    return _with_batches(data, f"{len(data.examples)} examples of {sequence_length} tokens")


def _with_batches(data: IndexedData, what: str) -> IndexedData:
    """Refuse data that do not fill one batch."""
    if data.num_batches == 0:
        raise TPUValidationError(
            f"{data.path} has {what}, which in {data.num_epochs} epochs is less than one batch of "
            f"{data.batch_size}; lower batch_size or sequence_length, or raise num_epochs."
        )
    return data


def as_array(source: Any) -> Any:
    """Convert arrays of other libraries to numpy; return anything else unchanged."""
    return np.asarray(source) if hasattr(source, "__array__") else source


def open_tokens(
    source: "str | Path | np.ndarray",
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    text_key: str = "text",
    dtype: str | None = None,
) -> TokenStore:
    """Open the tokens of a file, folder, bucket or array; text is tokenized into the cache.

    Raises:
        TPUValidationError: The data are missing or damaged.
        ConfigError: Text has no tokenizer, or a bucket may not be read.
    """
    if isinstance(source, np.ndarray):
        check_token_dtype("the array", source.dtype, source.ndim)
        return TokenStore((ArrayShard("the array", source),), "array", "the array")
    location = open_location(source)
    kind = kind_of(location)
    if kind.name == "prepared":
        return _open_prepared(location)
    if kind.name == "tokens":
        return _open_shards(location, kind, dtype)
    if tokenizer is None:
        raise ConfigError(
            f"{location.path} is {kind.name.replace('_', ' ')}, which needs a tokenizer: tokenizer="
            "'bytes', or the path of a tokenizer.json. 'tpukit data prepare' tokenizes it "
            "permanently."
        )
    return _open_text(location, kind, load_tokenizer(tokenizer), text_key)


def _open_shards(location: Location, kind: DataKind, dtype: str | None) -> TokenStore:
    opened = _open_all(location, kind.files, dtype)
    shards = tuple(shard for shard in opened if shard is not None)
    suffixes = {name.rsplit(".", 1)[1].lower() for name in kind.files}
    documents = None
    if kind.files == ("tokens.npy",) and DOCUMENTS in location.names:
        documents = _documents(location, sum(shard.num_tokens for shard in shards))
    return TokenStore(shards, "+".join(sorted(suffixes)), location.path, documents)


def _open_prepared(location: Location) -> TokenStore:
    manifest = read_manifest(location.content(MANIFEST), name=f"{location.path}/{MANIFEST}")
    opened = _open_all(location, [entry.file for entry in manifest.shards], manifest.dtype)
    shards = check_shards(manifest, opened, folder=location.path)
    return TokenStore(
        shards,
        "prepared",
        location.path,
        _documents(location, manifest.num_tokens),
        manifest.largest_token,
        dict(manifest.tokenizer),
        manifest.checksum,
        {entry.file: entry.blake2b for entry in manifest.shards},
        None if manifest.answers_blake2b is None else _answers(location, manifest),
    )


def _open_all(
    location: Location, names: Sequence[str], dtype: str | None
) -> list[TokenShard | None]:
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:  # in a bucket they have a latency
        return list(pool.map(lambda name: location.shard(name, dtype=dtype), names))


def _documents(location: Location, num_tokens: int) -> np.ndarray:
    offsets = _read_all(location, DOCUMENTS)
    return check_documents(offsets, num_tokens, name=f"{location.path}/{DOCUMENTS}")


def _answers(location: Location, manifest: DataManifest) -> np.ndarray:
    edges = _read_all(location, ANSWERS)
    return check_answers(edges, manifest, name=f"{location.path}/{ANSWERS}")


def _read_all(location: Location, name: str) -> np.ndarray:
    shard = location.shard(name)
    if shard is None:
        raise TPUValidationError(f"{location.path}/{name} is missing; copy the folder again.")
    return shard.read([(0, shard.num_tokens)])[0]


def _open_text(
    location: Location, kind: DataKind, tokenizer: Tokenizer, text_key: str
) -> TokenStore:
    about = f"{location.version(kind.files)};{tokenizer_key(tokenizer)};{text_key}"
    key = hashlib.blake2b(about.encode(), digest_size=12).hexdigest()
    folder = private_folder(cache_folder("tokens")) / key
    prepare_tokens(location.path, folder, tokenizer=tokenizer, text_key=text_key, exist_ok=True)
    # Messages name the user's path, not that of the cached tokens.
    return dataclasses.replace(_open_prepared(open_location(folder)), path=location.path)


def _check_content(store: TokenStore, vocab_size: int | None) -> None:
    if store.num_tokens == 0:
        raise TPUValidationError(f"{store.path} contains no tokens; give data with tokens.")
    largest = store.largest_token
    if vocab_size is not None and largest is not None and largest >= vocab_size:
        raise vocabulary_overflow(store, largest, vocab_size)


def _check_settings(
    batch_size: int,
    seed: int,
    packing: str,
    process_index: int,
    process_count: int,
    num_epochs: int | None,
) -> None:
    if packing not in PACKINGS:
        raise ConfigError(
            f"packing is '{packing}'; choose {' or '.join(PACKINGS)}."
            + did_you_mean(packing, PACKINGS)
        )
    if batch_size < 1 or batch_size % process_count:
        raise ConfigError(
            f"batch_size={batch_size} cannot be split evenly over {process_count} processes; "
            f"choose a multiple of {process_count}."
        )
    if not 0 <= process_index < process_count:
        raise ConfigError(
            f"process_index={process_index} is not in 0 … {process_count - 1}; give the index of "
            "a process."
        )
    if seed < 0:
        raise ConfigError(f"seed={seed} is negative; choose 0 or more.")
    if num_epochs is not None and num_epochs < 1:
        raise ConfigError(f"num_epochs={num_epochs}; choose 1 or more, or None for endless epochs.")
