"""One kind of model: how it is recognised, adapted, checkpointed and written to files."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from ..remat.policy import RematPolicy
from .protocol import ModelAdapter, ModelInputs

WEIGHTS_FILE = "model.safetensors"


class TrainedArrays(NamedTuple):
    """The arrays of a checkpoint by path, such as "layer/w"."""

    params: Mapping[str, Any]
    model_state: Mapping[str, Any]


# (model) -> plain data that `WriteFiles` needs beside the arrays.
Describe = Callable[[Any], dict[str, Any]]
# (record, arrays, folder) -> Python code that loads the written files. The code may use `model`,
# the object that the user's code builds, and `folder`.
WriteFiles = Callable[[Mapping[str, Any], TrainedArrays, Path], str]


def write_arrays(record: Mapping[str, Any], arrays: TrainedArrays, folder: Path) -> str:
    """Write all arrays by path, for frameworks without a file format of their own."""
    del record
    whole = {**arrays.params, **{f"model_state/{k}": v for k, v in arrays.model_state.items()}}
    save_tensors({name: plain_array(array) for name, array in whole.items()}, folder)
    return (
        "from safetensors.numpy import load_file\n\n"
        f'params = load_file(folder + "/{WEIGHTS_FILE}")  # names are paths of the tree: "layer/w"'
    )


def save_tensors(tensors: Mapping[str, np.ndarray], folder: Path) -> None:
    """Write one safetensors file; arrays that share memory are written separately."""
    whole = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(whole, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def plain_array(array: Any) -> np.ndarray:
    """Return a numpy array; a random key becomes its key data."""
    if hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays as nested dicts by the parts of their paths."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, leaf = name.split("/")
        branch = tree
        for word in parents:
            branch = branch.setdefault(word, {})
        branch[leaf] = array
    return tree


def code_of(model: Any) -> dict[str, str | None]:
    """Return the name and file of a model's code."""
    inner = model[-1] if isinstance(model, tuple) else getattr(model, "func", model)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]  anything
    inner = getattr(inner, "module", inner) if type(inner).__name__ == "TorchModel" else inner  # pyright: ignore[reportUnknownArgumentType]
    named: Any = inner if isinstance(inner, type) or inspect.isroutine(inner) else type(inner)  # pyright: ignore[reportUnknownArgumentType]
    try:
        file = inspect.getsourcefile(named)
    except TypeError:  # of something built in
        file = None
    name = f"{named.__module__}.{named.__qualname__}".removeprefix("__main__.")
    return {"name": name, "file": None if file is None else os.path.abspath(file)}


Recognises = Callable[[object], bool]
Build = Callable[[Any, ModelInputs], ModelAdapter]
Checkpoint = Callable[[Any, RematPolicy], Any]


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """One entry of the registry.

    Attributes:
        name: The framework, e.g. "flax linen".
        accepts: What a user passes, e.g. "a flax linen module"; error messages list it.
        recognises: Whether an object is a model of this kind. It must not import the framework.
        build: Returns the adapter for a model and its inputs.
        checkpoint: Returns the same model with gradient checkpoints; None where the framework has
            none.
        describe: Returns plain data that `write` needs beside the model's arrays.
        write: Writes a trained model to the framework's own files.
    """

    name: str
    accepts: str
    recognises: Recognises
    build: Build
    checkpoint: Checkpoint | None = None
    describe: Describe | None = None
    write: WriteFiles = write_arrays
