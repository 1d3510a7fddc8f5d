"""Batches in the forms that PyTorch users have: tensors, tuples, dicts, dataclasses, loaders."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union

import jax
import numpy as np

from ..annotations import PyTree
from ..errors import TPUValidationError
from ..models.adapters.torch_module.arrays import to_array
from ..models.adapters.torch_module.environment import Nesting, take_apart

if TYPE_CHECKING:
    import torch

# A tensor, a tuple of positional arguments, or a dict of keyword arguments.
TorchInputs: TypeAlias = Union["torch.Tensor", tuple[Any, ...], Mapping[str, Any]]
Module = TypeVar("Module", bound="torch.nn.Module")
# Tensors in any container: tuples, dicts, dataclasses, a DataLoader.
Data = TypeVar("Data")


@dataclass(frozen=True)
class PreparedLoader:
    """A loader whose batches are prepared one by one during iteration."""

    loader: Any
    prepare: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        """Yield prepared batches."""
        return map(self.prepare, self.loader)

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the loader."""
        return getattr(self.loader, name)


def prepare_batch(data: Any, device: Any) -> Any:
    """Return data with every tensor on `device` and contiguous; structure and dtypes stay.

    Numpy arrays become tensors; other values are returned unchanged.

    Raises:
        TPUValidationError: A tensor has no values, or an array is not numeric.
    """
    import torch

    if isinstance(data, torch.Tensor):
        if data.is_meta:
            raise TPUValidationError(
                "a batch has a tensor on torch's meta device, which has no values; load the data "
                "on the CPU."
            )
        return data.to(device).contiguous() if not data.is_sparse else data.to_dense().to(device)
    if isinstance(data, np.ndarray):
        if data.dtype.kind not in "biufc":
            raise TPUValidationError(
                f"a batch has a numpy array of {data.dtype}; expected numbers. Leave it out of the "
                "batch or encode it as numbers."
            )
        return torch.from_numpy(np.ascontiguousarray(data)).to(device)
    if isinstance(data, torch.utils.data.DataLoader):
        return PreparedLoader(data, lambda batch: prepare_batch(batch, device))
    if isinstance(data, Mapping):
        made = {key: prepare_batch(value, device) for key, value in data.items()}
        return made if type(data) is dict else _as_mapping(data, made)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(prepare_batch(value, device) for value in data))  # pyright: ignore[reportUnknownVariableType]  a named tuple
    if isinstance(data, list | tuple):
        return type(data)(prepare_batch(value, device) for value in data)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  of anything
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        changes = {
            field.name: prepare_batch(getattr(data, field.name), device)
            for field in dataclasses.fields(data)
            if field.init
        }
        return dataclasses.replace(data, **changes)
    return data


def _as_mapping(data: Any, made: dict[Any, Any]) -> Any:
    """Return a mapping of another class (Hugging Face's BatchEncoding) with new values."""
    try:
        return type(data)(made)
    except TypeError:
        return made


def flat_batch(batch: PyTree) -> tuple[dict[str, jax.Array], Nesting]:
    """Return a batch's tensors as arrays by name, and their nesting for `nested_batch`.

    Raises:
        TPUValidationError: The batch has no tensor.
    """
    tensors, nesting = take_apart(batch)
    if not tensors:
        raise TPUValidationError(
            "a step needs tensors, but this batch has none; pass tensors as inputs or targets."
        )
    arrays = {_name(index): to_array(tensor, copy=False) for index, tensor in enumerate(tensors)}
    return arrays, nesting


def nested_batch(tensors: Mapping[str, PyTree], nesting: Nesting) -> PyTree:
    """Return tensors by name in the containers of the batch of `flat_batch`."""
    return nesting.rebuild([tensors[_name(index)] for index in range(len(tensors))])


def _name(index: int) -> str:
    return f"tensor {index}"
