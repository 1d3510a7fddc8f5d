"""Import and export of Hugging Face weights, one parameter at a time."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from ...annotations import PyTree
from ...errors import TPUModelError
from ...plain_data import JsonMapping
from ..adapters import TransformerAdapter
from ..execution import Execution
from ..transformer.config import TransformerConfig
from ..transformer.model import Transformer
from .config import (
    GENERATION_FILE,
    TOKEN_IDS,
    config_to_huggingface,
    family_for,
    family_of,
    text_part,
)
from .files import INDEX_FILE, SINGLE_FILE, TensorFiles, read_json
from .published.reading import quantization_of
from .tensors import TensorEntry, tensor_entries

DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ImportedModel:
    """A transformer and its parameters, in the tree of a workload's state.

    Without `shardings` the parameters are numpy arrays on the host.
    """

    config: TransformerConfig
    params: dict[str, Any]

    def module(self, execution: Execution | None = None) -> Transformer:
        """Return the parameters as an nnx module."""
        return TransformerAdapter(self.config).module(self.params, execution or Execution())


def import_huggingface(
    folder: str | Path,
    *,
    config: TransformerConfig | None = None,
    dtype: DTypeLike | None = None,
    shardings: PyTree | Callable[[TransformerConfig], PyTree] = None,
) -> ImportedModel:
    """Read `config.json` and the safetensors of a Hugging Face folder.

    Quantized weights (GPTQ, AWQ, compressed-tensors, FP8 by blocks, MXFP4, bitsandbytes) are
    dequantized to `dtype`, or to the dtype of config.json.

    With `shardings` each parameter moves to its devices as soon as it is complete, so the host
    holds one stacked parameter at a time.

    Args:
        folder: A folder with `config.json` and `model.safetensors`, or shards and their index.
        config: A configuration that replaces `config.json`.
        dtype: The dtype of the parameters; by default the stored one.
        shardings: A tree like the parameters, such as `workload.layout(mesh).shardings`, or a
            function from the configuration to such a tree.

    Raises:
        TPUModelError: A file or tensor is missing, a shape differs from the configuration, or the
            architecture is not supported.
    """
    folder = Path(folder)
    given = config
    data = None if config else read_json(folder / "config.json")
    if data is not None:
        config, family = TransformerConfig.from_huggingface(data), family_of(data)
    else:
        assert config is not None
        family = family_for(config)
        data = family.json(config)
    params: dict[str, Any] = {}
    with ExitStack() as stack:
        tensors = _Checkpoint(folder, stack, data, dtype)
        prefix, head = tensors.prefixes()
        # transformers writes the number of prediction layers but may leave out their weights.
        if given is None and f"{prefix}layers.{config.n_layers}.eh_proj.weight" not in tensors:
            config = config.replace(mtp_layers=0)
        tensors_of_layers = family.layer_tensors(config, text_part(data))
        places = shardings(config) if callable(shardings) else shardings
        found = tensor_entries(config, tensors_of_layers, prefix=prefix, head=head)
        for path, group in itertools.groupby(found, key=_path_of):
            value = _assemble(tensors, list(group), config, dtype)
            sharding = None if places is None else _look_up(places, path)
            _put(params, path, value if sharding is None else jax.device_put(value, sharding))
    return ImportedModel(config, params)


def export_huggingface(
    params: Mapping[str, Any],
    config: TransformerConfig,
    folder: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    generation: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write parameters as a folder that Hugging Face (and `import_huggingface`) reads.

    Args:
        params: The parameters of a reference transformer; sharded arrays are gathered one at a
            time.
        config: The configuration of the transformer.
        folder: Created if it does not exist.
        max_shard_bytes: The largest file; more bytes go into several files with an index.
        generation: Entries of `generation_config.json`; the file is not written without them. Its
            token ids are also written to `config.json`. A missing id is written there as null,
            because the defaults of `transformers` belong to another vocabulary.

    Returns:
        The safetensors files written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    sizes = [0]
    written: list[Path] = []
    where: dict[str, int] = {}
    for name, tensor in _tensors_of(params, config):
        if shards[-1] and sizes[-1] + tensor.nbytes > max_shard_bytes:
            written.append(_write_shard(folder, len(written), shards.pop()))
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += tensor.nbytes
        where[name] = len(written)
    written.append(_write_shard(folder, len(written), shards.pop()))
    names = _final_names(len(written))
    written = [part.rename(folder / name) for part, name in zip(written, names, strict=True)]
    if len(written) > 1:
        index = {
            "metadata": {"total_size": sum(sizes)},
            "weight_map": {name: names[shard] for name, shard in where.items()},
        }
        _write_json(folder / INDEX_FILE, index)
    about = {
        **config_to_huggingface(config),
        "dtype": config.dtype,
        **{key: (generation or {}).get(key) for key in TOKEN_IDS},
    }
    _write_json(folder / "config.json", about)
    if generation is not None:
        _write_json(folder / GENERATION_FILE, generation)
    return written


def _write_json(path: Path, data: JsonMapping) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


class _Checkpoint:
    """The tensors of a folder, dequantized where necessary."""

    def __init__(
        self, folder: Path, stack: ExitStack, data: JsonMapping, dtype: DTypeLike | None
    ) -> None:
        self.files = TensorFiles(folder, stack)
        self.quantization = quantization_of(data)
        stated = data.get("dtype") or data.get("torch_dtype")
        widened = stated if stated in ("bfloat16", "float16", "float32") else "bfloat16"
        self.widened: DTypeLike = dtype or np.dtype(widened)

    def __contains__(self, name: str) -> bool:
        quantized = self.quantization is not None and self.quantization.holds(name, self.files)
        return quantized or name in self.files

    def read(self, entry: TensorEntry, config: TransformerConfig) -> np.ndarray:
        if entry.name not in self:
            raise TPUModelError(
                f"tensor '{entry.name}' is not in {self.files.folder}; the weights are incomplete, "
                f"or do not match config.json with {config.n_layers} layers."
            )
        tensor = self._tensor(entry.name)
        if tensor.shape != entry.stored_shape:
            raise TPUModelError(
                f"tensor '{entry.name}' has shape {tensor.shape}, but config.json requires "
                f"{entry.stored_shape}; weights and configuration do not match."
            )
        return entry.source.read(tensor)

    def _tensor(self, name: str) -> np.ndarray:
        if self.quantization is not None and self.quantization.holds(name, self.files):
            return self.quantization.read(name, self.files).dequantize(self.widened)
        return self.files.read(name)

    def prefixes(self) -> tuple[str, str]:
        """Return the prefixes of tensor names: of the decoder, and of the unembedding.

        A decoder inside a larger model has longer prefixes.
        """

        def prefix(ending: str, default: str) -> str:
            names = [name for name in self.files if name.endswith(ending)]
            return min(names, key=len).removesuffix(ending) if names else default

        return prefix("embed_tokens.weight", "model."), prefix("lm_head.weight", "")


def _assemble(
    tensors: _Checkpoint,
    entries: list[TensorEntry],
    config: TransformerConfig,
    dtype: DTypeLike | None,
) -> np.ndarray:
    first = tensors.read(entries[0], config)
    target = np.dtype(dtype or first.dtype)
    if not entries[0].index:
        return np.ascontiguousarray(first, dtype=target)
    stack = tuple(size + 1 for size in entries[-1].index)
    parameter = np.empty((*stack, *first.shape), target)
    parameter[entries[0].index] = first
    for entry in entries[1:]:
        parameter[entry.index] = tensors.read(entry, config)
    return parameter


def _tensors_of(
    params: Mapping[str, Any], config: TransformerConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of the checkpoint; a parameter is gathered on its first use."""
    family = family_for(config)
    data = family.json(config)
    tensors_of_layers = family.layer_tensors(config, data)
    parts: dict[str, list[TensorEntry]] = {}
    for entry in tensor_entries(config, tensors_of_layers, prefix="model.", head="", copies=True):
        parts.setdefault(entry.name, []).append(entry)
    last_use = {entry.path: name for name, group in parts.items() for entry in group}
    gathered: dict[str, np.ndarray] = {}
    for name, group in parts.items():
        for path in {entry.path for entry in group} - gathered.keys():
            gathered[path] = np.asarray(_look_up(params, path))
        yield name, _joined(name, group, gathered)
        for path in [path for path in gathered if last_use[path] == name]:
            del gathered[path]


def _joined(name: str, group: list[TensorEntry], gathered: dict[str, np.ndarray]) -> np.ndarray:
    """Return the tensor of these entries, which are its parts."""
    dtype = gathered[group[0].path].dtype
    tensor = np.empty(group[0].stored_shape, dtype)
    for entry in group:
        part = gathered[entry.path][entry.index]
        if part.shape != entry.shape:
            raise TPUModelError(
                f"parameter '{entry.path}' has shape {part.shape} for '{name}', but the config "
                f"requires {entry.shape}; parameters and configuration do not match."
            )
        entry.source.write(tensor, part)
    return tensor


def _write_shard(folder: Path, number: int, tensors: dict[str, np.ndarray]) -> Path:
    # The final name contains the number of files, which is known only at the end.
    path = folder / f".writing-{number}.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def _final_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _path_of(entry: TensorEntry) -> str:
    return entry.path


def _look_up(tree: PyTree, path: str) -> Any:
    for word in path.split("/"):
        if not isinstance(tree, Mapping) or word not in tree:
            raise TPUModelError(
                f"the parameters have no '{path}'; they belong to another transformer."
            )
        tree = tree[word]
    return tree


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split("/")
    for word in parents:
        tree = tree.setdefault(word, {})
    tree[leaf] = value
