"""Fit codebooks to a model's own keys and values, and keep them in a folder."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...annotations import PyTree
from ...errors import TPUCheckpointError
from ...hardware.stored_formats import CACHE_FORMATS, CacheFormat, parse_cache_format
from ...models.generation.cache import CacheSpec, kept_units
from ...models.generation.cache_slots import root_mean_squares, rotate
from ...models.generation.forward import read_prompts
from ...models.generation.generator import transformer_config
from ...models.generation.programs import DecodingPrograms
from ...models.stored.running import with_stored_parameters
from ...models.transformer.config import TransformerConfig
from ...plain_data import read_json
from ...runtime.files import finish_folder, folder_beside, new_folder
from ...runtime.progress import Counted, Progress, silent
from ..codebooks.codebook import Codebook
from ..codebooks.codebook_training import train_codebook
from ..files.array_files import load_arrays, save_arrays

DESCRIPTION, ARRAYS = "kv_cache.json", "kv_cache.safetensors"
VERSION = 1
_MOST_VECTORS = 2**16  # of each layer, which is 256 to an entry


def fit_cache(
    model: object,
    params: PyTree,
    prompts: ArrayLike,
    *,
    kv: CacheFormat | str = "pq4",
    seed: int = 0,
    progress: Progress = silent,
) -> CacheSpec:
    """Return a cache format with codebooks that are fitted to a model's keys and values.

    Every layer gets one codebook for its keys and one for its values, fitted to the prompts after
    the rotation and scaling of the cache. Integer formats need no codebook and are returned
    unchanged.

    Args:
        model: A preset's name, a `TransformerConfig`, or a `Workload` of one.
        params: Its parameters.
        prompts: (rows, tokens) of text that the model is for.
        kv: The cache format.
        seed: Seed of the k-means.
        progress: Called with a line for each codebook.
    """
    format, config = parse_cache_format(kv), transformer_config(model)
    if not format.entries:
        return CacheSpec(format)
    rows = jnp.asarray(prompts, jnp.int32)
    cache = _filled(config, params, rows)
    total = sum(len(kept_units(config.kinds[kind])) * n for kind, n in _layers(config).items())
    books: dict[str, dict[str, Any]] = {}
    done = 0
    for kind in _layers(config):
        for name, unit in kept_units(config.kinds[kind]).items():
            fitted: list[Codebook] = []
            for layer in getattr(cache[kind], name).array:
                held = layer[:, : rows.shape[1]].reshape(-1, unit.number, unit.width)
                vectors = _vectors(format, held, seed)
                book = train_codebook(
                    vectors, entries=format.entries, length=format.group, seed=seed
                )
                fitted.append(Codebook(book.entries, book.scale))
                done += 1
                progress(Counted(f"codebook of {kind}'s {name}", done=done, total=total))
            books.setdefault(kind, {})[name] = jax.tree.map(lambda *one: jnp.stack(one), *fitted)
    return CacheSpec(format, books)


def save_cache(spec: CacheSpec, folder: str | Path) -> Path:
    """Write a cache format and its codebooks into a new folder, for `--kv FOLDER`.

    Raises:
        TPUValidationError: The folder holds files already.
    """
    target = new_folder(folder)
    tensors: dict[str, jax.Array] = {}
    for kind, named in spec.books.items():
        for name, book in named.items():
            assert isinstance(book, Codebook)
            tensors[f"{kind}/{name}/entries"] = book.entries
            tensors[f"{kind}/{name}/scale"] = book.scale
    with folder_beside(target) as made:
        save_arrays(made / ARRAYS, {}, others=tensors, source="tpukit quantize --kv")
        about = {"version": VERSION, "format": spec.format.name}
        (made / DESCRIPTION).write_text(json.dumps(about) + "\n")
        finish_folder(made, target)
    return target


def load_cache(folder: str | Path, model: object) -> CacheSpec:
    """Read a folder that `save_cache` wrote, and check it against a model.

    Raises:
        TPUCheckpointError: The folder is damaged, of another version or of another model.
    """
    place, config = Path(folder).expanduser(), transformer_config(model)
    format = _format_in(place / DESCRIPTION)
    _, tensors = load_arrays(place / ARRAYS)
    books: dict[str, dict[str, Any]] = {}
    for kind, layers in _layers(config).items() if format.entries else ():
        for name in kept_units(config.kinds[kind]):
            entries, scale = (
                tensors.pop(f"{kind}/{name}/{part}", None) for part in ("entries", "scale")
            )
            shape = (layers, 1, format.entries, format.group)
            fits = (
                entries is not None
                and scale is not None
                and (entries.shape, str(entries.dtype)) == (shape, "int8")
                and (scale.shape, str(scale.dtype)) == ((layers,), "float32")
                and bool(np.isfinite(scale).all())
            )
            if not fits:
                stored = "nothing" if entries is None else f"{entries.dtype}{list(entries.shape)}"
                raise TPUCheckpointError(
                    f"{place} holds {stored} for the {name} of layers '{kind}'; expected "
                    f"int8{list(shape)} of '{config.name}'. It is of another model, or damaged."
                )
            assert entries is not None
            assert scale is not None
            books.setdefault(kind, {})[name] = Codebook(entries, scale)
    if tensors:
        raise TPUCheckpointError(
            f"{place} holds {', '.join(sorted(tensors)[:3])}, which '{config.name}' has no use "
            "for; it is of another model."
        )
    return CacheSpec(format, books)


def is_cache_folder(folder: Path) -> bool:
    """Return whether `save_cache` wrote a folder."""
    return (folder / DESCRIPTION).is_file()


def _layers(config: TransformerConfig) -> dict[str, int]:
    """Return the number of layers of each kind that have a KV cache."""
    return {
        kind: count
        for kind, count in Counter(config.layer_order).items()
        if config.kinds[kind].shares_keys_of is None and kept_units(config.kinds[kind])
    }


def _filled(config: TransformerConfig, params: PyTree, rows: jax.Array) -> Any:
    """Return a bfloat16 cache that is filled with the prompts."""
    programs = DecodingPrograms(config, loop=True)

    def read(params: PyTree, tokens: jax.Array) -> PyTree:
        lengths = jnp.full(tokens.shape[0], tokens.shape[1])
        return read_prompts(
            *(programs.config, params, tokens, lengths),
            slots=tokens.shape[1],
            execution=programs.execution,
        )[1]

    return jax.jit(with_stored_parameters(read))(params, rows)


def _vectors(format: CacheFormat, held: jax.Array, seed: int) -> jax.Array:
    """Return a sample of the vectors that the cache will encode."""
    units = rotate(held.astype(jnp.float32))
    blocks = units.reshape(-1, format.sharing(held.shape[-1]))
    scaled = blocks / root_mean_squares(blocks)[:, None].astype(jnp.float32)
    vectors = scaled.reshape(-1, format.group)
    if len(vectors) <= _MOST_VECTORS:
        return vectors
    chosen = np.random.default_rng(seed).choice(len(vectors), _MOST_VECTORS, replace=False)
    return vectors[np.sort(chosen)]


def _format_in(file: Path) -> CacheFormat:
    try:
        about = read_json(file)
    except (OSError, ValueError) as error:
        raise TPUCheckpointError(
            f"{file} cannot be read ({error}); give a folder that 'tpukit quantize --kv … -o' "
            "wrote."
        ) from None
    known = isinstance(about, dict) and about.get("version") == VERSION
    name = about.get("format") if known else None
    if not isinstance(name, str) or name not in CACHE_FORMATS:
        raise TPUCheckpointError(
            f"{file} is not of version {VERSION}, or names no cache format; write it again."
        )
    return CACHE_FORMATS[name]
