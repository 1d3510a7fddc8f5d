"""A user's trained model in its framework's own files: what a run records for it, and writes."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

WEIGHTS_FILE = "model.safetensors"


class TrainedArrays(NamedTuple):
    """The arrays of a checkpoint by name, the words of which are joined by "/"."""

    params: Mapping[str, Any]
    model_state: Mapping[str, Any]


# Records what the arrays of a model do not say; plain data.
Describe = Callable[[Any], dict[str, Any]]
# Writes arrays into a folder by that record, and returns the lines of Python that open the files,
# where `model` is the object that the user's code builds and `folder` the folder.
WriteFiles = Callable[[Mapping[str, Any], TrainedArrays, Path], str]


def write_arrays(record: Mapping[str, Any], arrays: TrainedArrays, folder: Path) -> str:
    """Write all arrays under their names, for models without a file format of their own."""
    del record
    whole = {**arrays.params, **{f"model_state/{k}": v for k, v in arrays.model_state.items()}}
    save_tensors({name: plain_array(array) for name, array in whole.items()}, folder)
    return (
        "from safetensors.numpy import load_file\n\n"
        f'params = load_file(folder + "/{WEIGHTS_FILE}")  # names are paths of the tree: "layer/w"'
    )


def save_tensors(tensors: Mapping[str, np.ndarray], folder: Path) -> None:
    """Write one safetensors file; arrays of one memory under several names are written each."""
    whole = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(whole, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def plain_array(array: Any) -> np.ndarray:
    """Return an array of numbers; of a random key its words."""
    if hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays as a tree of dicts, by the words of their names."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, leaf = name.split("/")
        branch = tree
        for word in parents:
            branch = branch.setdefault(word, {})
        branch[leaf] = array
    return tree


def code_of(model: Any) -> dict[str, str | None]:
    """Return the name and file of the code that a model is written in."""
    inner = model[-1] if isinstance(model, tuple) else getattr(model, "func", model)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]  anything
    inner = getattr(inner, "module", inner) if type(inner).__name__ == "TorchModel" else inner  # pyright: ignore[reportUnknownArgumentType]
    named: Any = inner if isinstance(inner, type) or inspect.isroutine(inner) else type(inner)  # pyright: ignore[reportUnknownArgumentType]
    try:
        file = inspect.getsourcefile(named)
    except TypeError:  # of something built in
        file = None
    name = f"{named.__module__}.{named.__qualname__}".removeprefix("__main__.")
    return {"name": name, "file": None if file is None else os.path.abspath(file)}
