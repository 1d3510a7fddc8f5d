"""Quantized models on disk: a folder of one safetensors file and one description.

`quantized.safetensors` holds every array (see `files`: version, digest, codes checked against
their codebook); `quantized.json` says what they are: for each parameter its shape, dtype and axes,
and for each of its matrices the kind, format and shape. Everything is checked before it is used.
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
from ...kernels.ops.quantized_matmul.weight import FORMATS, ROWS_PER_ELEMENT, QuantizedWeight
from ...models.stored.calibration import path_text
from ...models.stored.parameter import StoredParameter, is_stored
from ...models.stored.part_stack import stacked
from ...models.stored.product import MatrixAxes
from ...models.transformer.config import TransformerConfig
from ...plain_data import read_json
from ...runtime.files import finish_folder, folder_beside, new_folder
from ..integers.qwix_matrices import ScaledInputs
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
    """What `load_quantized` read.

    Attributes:
        params: The parameters, stored ones among them.
        config: Of a reference transformer; None for other models.
        tokenizer: What its text was made into tokens with, where that was said.
        report: As plain data; empty where none was saved.
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
    """Write a quantized model into a new folder, which appears when it is complete.

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
    whole = {
        "version": VERSION,
        "config": None if config is None else config.to_dict(),
        "tokenizer": tokenizer,
        "parameters": parameters,
        "report": {} if report is None else report.to_dict(),
    }
    with folder_beside(target) as made:
        save_arrays(made / ARRAYS, arrays, others=others, source="tpukit quantize")
        (made / DESCRIPTION).write_text(json.dumps(whole, indent=1))
        finish_folder(made, target)
    return target


def load_quantized(folder: str | Path, *, like: PyTree = None) -> SavedModel:
    """Read what `save_quantized` wrote.

    Args:
        folder: Where.
        like: A tree of the model's parameters (their values do not matter), for models whose
            parameters are no nested dicts; what is read takes its form.

    Raises:
        TPUCheckpointError: It is damaged, of another version, or not of this tree.
    """
    place = Path(folder).expanduser()
    about = _described(place / DESCRIPTION)
    arrays, others = load_arrays(place / ARRAYS)
    try:
        leaves = {
            str(one["path"]): _parameter(str(one["path"]), one, arrays, others)
            for one in about["parameters"]
        }
        config = about["config"]
        known = None if config is None else TransformerConfig.from_dict(config)
        report, tokenizer = dict(about["report"]), about["tokenizer"]
    except _BADLY_DESCRIBED as error:
        raise TPUCheckpointError(
            f"{place / DESCRIPTION} and {ARRAYS} do not fit ({type(error).__name__}: {error}); "
            "quantize the model again."
        ) from None
    params = _nested(leaves) if like is None else _formed(leaves, like, place)
    return SavedModel(params, known, tokenizer, report)


def quantized_config(folder: Path) -> TransformerConfig | None:
    """The reference transformer that a folder holds; None where it holds another model.

    Raises:
        TPUCheckpointError: It cannot be read.
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
    """Whether a folder is one that `save_quantized` wrote."""
    return (folder / DESCRIPTION).is_file()


def _put(
    name: str, part: Any, arrays: dict[str, VQArray], others: dict[str, jax.Array]
) -> dict[str, Any]:
    """Add the arrays of a matrix or a parameter, and return what they are."""
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


def _parameter(name: str, said: Any, arrays: Any, others: Any) -> Any:
    if "parts" not in said:
        return _part(name, said, arrays, others)
    groups = {kind: tuple(map(int, said["axes"][kind])) for kind in ("stack", "inputs", "outputs")}
    axes = MatrixAxes(tuple(map(int, said["shape"])), **groups)
    if sorted(axes.order) != list(range(len(axes.shape))) or axes.count != len(said["parts"]):
        raise ValueError(f"{name} has {len(said['parts'])} matrices and shape {axes.shape}")
    parts = tuple(
        _part(f"{name}[{number}]", one, arrays, others) for number, one in enumerate(said["parts"])
    )
    for part in parts:
        if tuple(part.shape) != (axes.rows, axes.columns):
            raise ValueError(f"{name} has a matrix {part.shape} where {axes.rows, axes.columns} is")
    return StoredParameter(stacked(parts), axes, jnp.dtype(said["dtype"]).name)


def _part(name: str, said: Any, arrays: Any, others: Any) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "vq": lambda: arrays[name],
        "array": lambda: _array(name, said, others),
        "weight": lambda: _weight(name, said, others),
        "scaled": lambda: ScaledInputs(_weight(name, said, others), others[f"{name}.inputs"]),
    }
    return kinds[said["kind"]]()


def _array(name: str, said: Any, others: Any) -> jax.Array:
    found = _from_bits(others[name], said["dtype"])
    if list(found.shape) != said["shape"]:
        raise ValueError(f"{name} is {found.shape} and described as {said['shape']}")
    return found


def _weight(name: str, said: Any, others: Any) -> QuantizedWeight:
    format, (rows, columns) = said["format"], map(int, said["shape"])
    data, scales = _from_bits(others[f"{name}.data"], said["dtype"]), others[f"{name}.scales"]
    if format not in FORMATS or format == "vq":
        raise ValueError(f"{name} is in {format!r}")
    held = data.shape[0] * ROWS_PER_ELEMENT[format]
    fits = data.shape[1:] == (columns,) and rows <= held < rows + 256
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
