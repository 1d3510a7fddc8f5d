"""`open_data`: whatever holds training data, as batches for this process."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from ...errors import ConfigError, TPUValidationError, did_you_mean
from ...runtime.files import cache_folder, private_folder
from .examples import vocabulary_overflow
from .indexed import IndexedData
from .iterated import BatchIterable, IteratedData
from .kinds import DataKind, kind_of
from .locations import Location, look_at
from .manifest import (
    ANSWERS,
    DOCUMENTS,
    MANIFEST,
    DataManifest,
    check_answers,
    check_documents,
    check_shards,
    read_manifest,
)
from .prepare import prepare_tokens
from .read_ahead import NUM_WORKERS, PREFETCH
from .shards import ArrayShard, TokenShard, check_token_dtype
from .sources import named_data
from .stored import StoredData
from .stream import DataDescription, DataStream
from .tables import ArrayTable, ExampleShape, ImageTable, TableData
from .token_store import TokenStore
from .tokenizer import Tokenizer, load_tokenizer, tokenizer_key

PACKINGS = ("concat", "documents")
_FILES_AT_ONCE = 16


DataSource: TypeAlias = str | Path | np.ndarray | ArrayTable | ImageTable | BatchIterable


class TokenData(Protocol):
    """Data that a trainer can draw batches from."""

    def describe(self) -> DataDescription:
        """What the data are."""
        ...

    def stream(self) -> DataStream:
        """Batches from the start."""
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
        source: A token file (.npy, .bin), a folder of them, what `tpukit data prepare` wrote,
            text (.txt, .jsonl, ArrayRecord, a Hugging Face data set on disk), the same at
            gs://…, an array of tokens, an iterable of batches or a function that starts one;
            "file.py:function", an .npz file of arrays with one row per example, or a folder of
            images with a subfolder per class.
        sequence_length: Tokens in an example; None is for iterables only.
        batch_size: Examples in a batch, over all processes.
        vocab_size: Token numbers from here on are refused: at once where the largest is known
            (prepared data), else in the batch that holds one.
        seed: Of the shuffle.
        shuffle: Whether examples come in another order each epoch; tokens and text only.
        tokenizer: For text: see `load_tokenizer`. The tokens are made once and kept in the cache.
        text_key: Field with the text (or token numbers), where records have fields.
        packing: "concat" cuts everything every `sequence_length` tokens; "documents" puts whole
            documents side by side and adds segment_ids and positions.
        dtype: Of .bin files; when left out what their names say (x.uint32.bin), else uint16.
        process_index: Whose rows; this process's when left out.
        process_count: Of how many.
        num_epochs: Times through the data; None goes on forever.
        num_workers: Threads that read tokens ahead; an iterable is drawn from as it comes.
        prefetch: Reads that are under way, or done before they are asked for.
        shapes: The entries of an example that a model reads, to which arrays and images are
            fitted; as they are when left out.

    Raises:
        TPUValidationError: The data are missing, damaged, too few or not for this model.
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
    offered = {"process_index": process_index, "process_count": process_count, "seed": seed}
    source = as_array(named_data(source, batch_size=batch_size, **offered))
    if isinstance(source, ArrayTable | ImageTable):
        data = TableData(
            table=source if shapes is None else source.fitted(shapes),
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            process_index=process_index,
            process_count=process_count,
            num_epochs=num_epochs,
            num_workers=num_workers,
            prefetch=prefetch,
        )
        return _with_batches(data, f"{len(source)} examples")
    if not isinstance(source, str | Path | np.ndarray):
        return IteratedData(
            source=source,
            sequence_length=sequence_length,
            batch_size=batch_size,
            vocab_size=vocab_size,
            process_index=process_index,
            process_count=process_count,
            num_epochs=num_epochs,
        )
    if sequence_length is None or sequence_length < 1:
        where = "the array" if isinstance(source, np.ndarray) else look_at(source).path
        raise ConfigError(
            f"{where} is read as tokens, and sequence_length is {sequence_length}: give one from 1 "
            "on, or, for a model that reads no tokens, an .npz file, a folder with a folder of "
            "images per class, or file.py:function."
        )
    store = open_tokens(source, tokenizer=tokenizer, text_key=text_key, dtype=dtype)
    _check_content(store, vocab_size)
    data = StoredData(
        store=store,
        sequence_length=sequence_length,
        batch_size=batch_size,
        vocab_size=vocab_size,
        seed=seed,
        shuffle=shuffle,
        packing=packing,
        process_index=process_index,
        process_count=process_count,
        num_epochs=num_epochs,
        num_workers=num_workers,
        prefetch=prefetch,
    )
    if len(data.examples) == 0:
        raise TPUValidationError(
            f"{store.path} holds {store.num_tokens} tokens, fewer than one example of "
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
    """Arrays of other libraries as numpy's; anything else as it is."""
    return np.asarray(source) if hasattr(source, "__array__") else source


def open_tokens(
    source: "str | Path | np.ndarray",
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    text_key: str = "text",
    dtype: str | None = None,
) -> TokenStore:
    """The tokens of a file, folder, bucket or array; text is tokenized once, into the cache.

    Raises:
        TPUValidationError: The data are missing or damaged.
        ConfigError: Text without a tokenizer, or a bucket that may not be read.
    """
    if isinstance(source, np.ndarray):
        check_token_dtype("the array", source.dtype, source.ndim)
        return TokenStore((ArrayShard("the array", source),), "array", "the array")
    location = look_at(source)
    kind = kind_of(location)
    if kind.name == "prepared":
        return _open_prepared(location)
    if kind.name == "tokens":
        return _open_shards(location, kind, dtype)
    if tokenizer is None:
        raise ConfigError(
            f"{location.path} is {kind.name.replace('_', ' ')}, which needs a tokenizer: tokenizer="
            "'bytes', or the path of a tokenizer.json. 'tpukit data prepare' makes tokens of it "
            "once and for all."
        )
    return _open_text(location, kind, load_tokenizer(tokenizer), text_key)


def _open_shards(location: Location, kind: DataKind, dtype: str | None) -> TokenStore:
    found = _open_all(location, kind.files, dtype)
    shards = tuple(shard for shard in found if shard is not None)
    suffixes = {name.rsplit(".", 1)[1].lower() for name in kind.files}
    documents = None
    if kind.files == ("tokens.npy",) and DOCUMENTS in location.names:
        documents = _documents(location, sum(shard.num_tokens for shard in shards))
    return TokenStore(shards, "+".join(sorted(suffixes)), location.path, documents)


def _open_prepared(location: Location) -> TokenStore:
    manifest = read_manifest(location.content(MANIFEST), name=f"{location.path}/{MANIFEST}")
    found = _open_all(location, [entry.file for entry in manifest.shards], manifest.dtype)
    shards = check_shards(manifest, found, folder=location.path)
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
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:  # they may be far away
        return list(pool.map(lambda name: location.shard(name, dtype=dtype), names))


def _documents(location: Location, num_tokens: int) -> np.ndarray:
    name = f"{location.path}/{DOCUMENTS}"
    found = location.shard(DOCUMENTS)
    if found is None:
        raise TPUValidationError(f"{name} is missing; copy the whole folder again.")
    return check_documents(found.read([(0, found.num_tokens)])[0], num_tokens, name=name)


def _answers(location: Location, manifest: DataManifest) -> np.ndarray:
    name = f"{location.path}/{ANSWERS}"
    found = location.shard(ANSWERS)
    if found is None:
        raise TPUValidationError(f"{name} is missing; copy the whole folder again.")
    return check_answers(found.read([(0, found.num_tokens)])[0], manifest, name=name)


def _open_text(
    location: Location, kind: DataKind, tokenizer: Tokenizer, text_key: str
) -> TokenStore:
    about = f"{location.version(kind.files)};{tokenizer_key(tokenizer)};{text_key}"
    key = hashlib.blake2b(about.encode(), digest_size=12).hexdigest()
    folder = private_folder(cache_folder("tokens")) / key
    prepare_tokens(location.path, folder, tokenizer=tokenizer, text_key=text_key, exist_ok=True)
    # Messages name what the person gave, not where its tokens are kept.
    return dataclasses.replace(_open_prepared(look_at(folder)), path=location.path)


def _check_content(store: TokenStore, vocab_size: int | None) -> None:
    if store.num_tokens == 0:
        raise TPUValidationError(f"{store.path} holds no tokens; give data that hold some.")
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
        raise ConfigError(f"process_index={process_index} is not in 0 … {process_count - 1}.")
    if seed < 0:
        raise ConfigError(f"seed={seed} is negative; choose one from 0.")
    if num_epochs is not None and num_epochs < 1:
        raise ConfigError(f"num_epochs={num_epochs}; choose one from 1, or None to go on forever.")
