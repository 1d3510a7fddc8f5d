"""Quantized models on disk: a folder of one safetensors file and one description.

`quantized.safetensors` holds every array (see `array_files`). `quantized.json` has the shape, dtype
and axes of each parameter, and the kind, format and shape of each of its matrices. All of it is
checked before it is used.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...annotations import PyTree
from ...errors import TPUCheckpointError
from ...hardware.stored_formats import WEIGHT_FORMATS, rounded_formats
from ...kernels.ops.quantized_matmul.weight import QuantizedWeight
from ...models.stored.calibration import path_text
from ...models.stored.parameter import StoredParameter, is_stored
from ...models.stored.parts import stacked
from ...models.stored.view import MatrixAxes
from ...models.transformer.config import TransformerConfig
from ...plain_data import read_json
from ...runtime.files import finish_folder, folder_beside, new_folder
from ..integers import ScaledInputs
from ..model import QuantizedModel
from ..report import QuantReport
from ..vector_codes.vq_array import VQArray
from .array_files import load_arrays, save_arrays

DESCRIPTION, ARRAYS = "quantized.json", "quantized.safetensors"
VERSION = 1
# What numpy's safetensors does not write, and what is written in its place, bit for bit.
# What values of other types, shapes or sizes than a description has end in.
_BADLY_DESCRIBED = (
    KeyError,
    TypeError,
    AttributeError,
    ValueError,
    AssertionError,
    OverflowError,
)
_AS_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}


@dataclass(frozen=True)
class SavedModel:
    """A quantized model that `load_quantized` read.

    Attributes:
        params: The parameters, quantized ones as `StoredParameter`.
        config: The configuration of a reference transformer; None for other models.
        tokenizer: The tokenizer of its text, if it was stored.
        report: The quantization report as plain data; empty if none was saved.
    """

    params: PyTree
    config: TransformerConfig | None
    tokenizer: str | None
    report: Mapping[str, Any]


def save_quantized(
    model: QuantizedModel,
    folder: str | Path,
    *,
    report: QuantReport | None = None,
    tokenizer: str | None = None,
) -> Path:
    """Write a quantized model into a new folder, which appears only when it is complete.

    Raises:
        TPUValidationError: The folder holds files already.
    """
    target = new_folder(folder)
    arrays: dict[str, VQArray] = {}
    others: dict[str, jax.Array] = {}
    parameters: list[dict[str, Any]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(model.params, is_leaf=is_stored)[0]:
        name = path_text(path)
        if isinstance(leaf, StoredParameter):
            parts = [
                _put(f"{name}[{number}]", part, arrays, others)
                for number, part in enumerate(leaf.parts)
            ]
            axes = {kind: list(getattr(leaf.axes, kind)) for kind in ("stack", "inputs", "outputs")}
            about = {"shape": list(leaf.shape), "dtype": leaf.dtype, "axes": axes, "parts": parts}
        else:
            about = _put(name, jnp.asarray(leaf), arrays, others)
        parameters.append({"path": name, **about})
    config = model.config
    description = {
        "version": VERSION,
        "config": None if config is None else config.to_dict(),
        "tokenizer": tokenizer,
        "parameters": parameters,
        "report": {} if report is None else report.to_dict(),
    }
    with folder_beside(target) as made:
        save_arrays(made / ARRAYS, arrays, others=others, source="tpukit quantize")
        (made / DESCRIPTION).write_text(json.dumps(description, indent=1))
        finish_folder(made, target)
    return target


def load_quantized(folder: str | Path, *, like: PyTree = None) -> SavedModel:
    """Read a folder that `save_quantized` wrote.

    Args:
        folder: The folder.
        like: A tree with the structure of the model's parameters, for models whose parameters are
            no nested dicts; values do not matter.

    Raises:
        TPUCheckpointError: The folder is damaged, of another version, or of another tree.
    """
    place = Path(folder).expanduser()
    about = _described(place / DESCRIPTION)
    arrays, others = load_arrays(place / ARRAYS)
    try:
        leaves = {
            str(parameter["path"]): _parameter(str(parameter["path"]), parameter, arrays, others)
            for parameter in about["parameters"]
        }
        config = about["config"]
        known = None if config is None else TransformerConfig.from_dict(config)
        report, tokenizer = dict(about["report"]), about["tokenizer"]
    except _BADLY_DESCRIBED as error:
        raise TPUCheckpointError(
            f"{place / DESCRIPTION} and {ARRAYS} contradict each other ({type(error).__name__}: "
            f"{error}); "
            "quantize the model again."
        ) from None
    params = _nested(leaves) if like is None else _formed(leaves, like, place)
    return SavedModel(params, known, tokenizer, report)


def quantized_config(folder: Path) -> TransformerConfig | None:
    """Return the configuration of a folder's reference transformer; None for other models.

    Raises:
        TPUCheckpointError: The folder cannot be read.
    """
    try:
        config = _described(folder / DESCRIPTION)["config"]
        return None if config is None else TransformerConfig.from_dict(config)
    except _BADLY_DESCRIBED as error:
        raise TPUCheckpointError(
            f"{folder / DESCRIPTION} describes no model ({type(error).__name__}: {error}); "
            "quantize it again."
        ) from None


def is_quantized_folder(folder: Path) -> bool:
    """Return whether `save_quantized` wrote a folder."""
    return (folder / DESCRIPTION).is_file()


def _put(
    name: str, part: Any, arrays: dict[str, VQArray], others: dict[str, jax.Array]
) -> dict[str, Any]:
    """Add the arrays of a matrix or a parameter to `tensors`, and return their description."""
    if isinstance(part, VQArray):
        arrays[name] = part
        return {"kind": "vq"}
    if isinstance(part, ScaledInputs):
        others[f"{name}.inputs"] = part.inputs
        return {**_put(name, part.weight, arrays, others), "kind": "scaled"}
    if isinstance(part, QuantizedWeight):
        others[f"{name}.data"], others[f"{name}.scales"] = _bits(part.data), part.scales
        return {
            "kind": "weight",
            "format": part.format,
            "shape": list(part.shape),
            "dtype": jnp.dtype(part.data.dtype).name,
        }
    others[name] = _bits(part)
    return {"kind": "array", "shape": list(part.shape), "dtype": jnp.dtype(part.dtype).name}


def _bits(array: jax.Array) -> Any:
    stored = _AS_BITS.get(jnp.dtype(array.dtype).name)
    return np.asarray(array) if stored is None else np.asarray(array).view(stored)


def _from_bits(array: Any, dtype: str) -> jax.Array:
    raw = np.asarray(array)
    expected = _AS_BITS.get(dtype, dtype)
    if raw.dtype.name != expected:
        raise ValueError(f"an array of {dtype} is stored as {raw.dtype.name}")
    return jnp.asarray(raw.view(jnp.dtype(dtype)))


def _parameter(name: str, description: Any, arrays: Any, others: Any) -> Any:
    if "parts" not in description:
        return _part(name, description, arrays, others)
    groups = {
        kind: tuple(map(int, description["axes"][kind])) for kind in ("stack", "inputs", "outputs")
    }
    axes = MatrixAxes(tuple(map(int, description["shape"])), **groups)
    if sorted(axes.order) != list(range(len(axes.shape))):
        raise ValueError(
            f"{name} has the axes {axes.order}, expected each axis of {axes.shape} once"
        )
    count = len(description["parts"])
    if axes.count != count:
        raise ValueError(f"{name} has {count} matrices, expected {axes.count} of {axes.shape}")
    parts = tuple(
        _part(f"{name}[{number}]", part_description, arrays, others)
        for number, part_description in enumerate(description["parts"])
    )
    for part in parts:
        if tuple(part.shape) != (axes.rows, axes.columns):
            raise ValueError(
                f"{name} has a matrix {part.shape}, expected {axes.rows, axes.columns}"
            )
    return StoredParameter(stacked(parts), axes, jnp.dtype(description["dtype"]).name)


def _part(name: str, description: Any, arrays: Any, others: Any) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "vq": lambda: arrays[name],
        "array": lambda: _array(name, description, others),
        "weight": lambda: _weight(name, description, others),
        "scaled": lambda: ScaledInputs(
            _weight(name, description, others), others[f"{name}.inputs"]
        ),
    }
    return kinds[description["kind"]]()


def _array(name: str, description: Any, others: Any) -> jax.Array:
    array = _from_bits(others[name], description["dtype"])
    if list(array.shape) != description["shape"]:
        raise ValueError(f"{name} is {array.shape} but is described as {description['shape']}")
    return array


def _weight(name: str, description: Any, others: Any) -> QuantizedWeight:
    format, (rows, columns) = description["format"], map(int, description["shape"])
    data, scales = (
        _from_bits(others[f"{name}.data"], description["dtype"]),
        others[f"{name}.scales"],
    )
    if format not in rounded_formats():
        raise ValueError(f"{name} has the unknown format {format!r}")
    stored = WEIGHT_FORMATS[format]
    held = data.shape[0] * stored.values_per_element
    fits = data.shape[1:] == (columns,) and rows <= held < rows + 2 * stored.multiple
    if not fits or scales.shape[1:] != (columns,) or held % scales.shape[0]:
        raise ValueError(f"{name}: {data.shape}, scales {scales.shape} for {rows, columns}")
    return QuantizedWeight(data, scales, None, format, (rows, columns))


def _described(file: Path) -> dict[str, Any]:
    try:
        about = read_json(file)
    except (OSError, ValueError) as error:
        raise TPUCheckpointError(
            f"{file} cannot be read ({error}); give a folder that 'tpukit quantize -o' wrote."
        ) from None
    if not isinstance(about, dict) or about.get("version") != VERSION:
        raise TPUCheckpointError(f"{file} is not of version {VERSION}; quantize the model again.")
    return about


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, last = path.split("/")
        at = tree
        for name in above:
            at = at.setdefault(name, {})
        at[last] = leaf
    return tree


def _formed(leaves: Mapping[str, Any], like: PyTree, place: Path) -> PyTree:
    def take(path: Any, leaf: Any) -> Any:
        name = path_text(path)
        if name not in leaves or tuple(leaves[name].shape) != tuple(leaf.shape):
            raise TPUCheckpointError(
                f"{place} has no parameter {name} of shape {tuple(leaf.shape)}; it is of another "
                "model."
            )
        return leaves[name]

    return jax.tree_util.tree_map_with_path(take, like, is_leaf=is_stored)
