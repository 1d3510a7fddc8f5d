"""Batches as people have them: tensors, tuples, dicts, dataclasses, loaders of any of these."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..errors import TPUValidationError
from ..models.adapters.torch_module.arrays import to_array
from ..models.adapters.torch_module.nesting import Nesting, take_apart


@dataclass(frozen=True)
class PreparedLoader:
    """A loader whose batches are prepared one after the other, as they are asked for."""

    loader: Any
    prepare: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        """Yield prepared batches."""
        return map(self.prepare, self.loader)

    def __len__(self) -> int:
        """Batches in the loader."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the loader's own."""
        return getattr(self.loader, name)


def prepare_batch(data: Any, device: Any) -> Any:
    """Return data with every tensor on `device` and contiguous; structure and formats stay.

    Numpy arrays become tensors; what holds no tensor is left alone.

    Raises:
        TPUValidationError: It holds something that can neither be moved nor left alone.
    """
    import torch

    if isinstance(data, torch.Tensor):
        if data.is_meta:
            raise TPUValidationError(
                "a batch holds a tensor on torch's meta device, which has no values; load the data "
                "on the CPU."
            )
        return data.to(device).contiguous() if not data.is_sparse else data.to_dense().to(device)
    if isinstance(data, np.ndarray):
        if data.dtype.kind not in "biufc":
            raise TPUValidationError(
                f"a batch holds a numpy array of {data.dtype}; only numbers go to a device, so "
                "leave it out of the batch or encode it."
            )
        return torch.from_numpy(np.ascontiguousarray(data)).to(device)
    if isinstance(data, torch.utils.data.DataLoader):
        return PreparedLoader(data, lambda one: prepare_batch(one, device))
    if isinstance(data, Mapping):
        made = {key: prepare_batch(one, device) for key, one in data.items()}
        return made if type(data) is dict else _as_mapping(data, made)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(prepare_batch(one, device) for one in data))  # pyright: ignore[reportUnknownVariableType]  a named tuple
    if isinstance(data, list | tuple):
        return type(data)(prepare_batch(one, device) for one in data)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  of anything
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


def flat_batch(batch: Any) -> tuple[dict[str, jax.Array], Nesting]:
    """Return a batch's tensors as arrays by name, and the way back; see `nested_batch`.

    Raises:
        TPUValidationError: There is no tensor in it.
    """
    tensors, nesting = take_apart(batch)
    if not tensors:
        raise TPUValidationError("a step needs tensors; this batch holds none.")
    arrays = {_name(index): to_array(one, copy=False) for index, one in enumerate(tensors)}
    return arrays, nesting


def nested_batch(tensors: Mapping[str, Any], nesting: Nesting) -> Any:
    """Return tensors by name in the containers that `flat_batch` took them from."""
    return nesting.rebuild([tensors[_name(index)] for index in range(len(tensors))])


def _name(index: int) -> str:
    return f"tensor {index}"
