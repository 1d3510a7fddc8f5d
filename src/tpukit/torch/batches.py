"""Batches as people have them: tensors, tuples, dicts, dataclasses, loaders of any of these."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..errors import TPUValidationError
from ..models.adapters.torch_module.arrays import to_array
from ..models.adapters.torch_module.environment import torch_trees


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


class BatchStructure:
    """How a batch's tensors, by name, become inputs and targets again; equal if shaped alike."""

    def __init__(self, tree: Any, leaves: list[Any]) -> None:
        import torch

        self._tree = tree
        self._leaves = [None if isinstance(one, torch.Tensor) else one for one in leaves]
        self._is_tensor = [isinstance(one, torch.Tensor) for one in leaves]
        self._key = (str(tree), repr(self._leaves), tuple(self._is_tensor))

    def rebuild(self, batch: Mapping[str, Any]) -> Any:
        """Return the batch, with its tensors taken by name."""
        trees = torch_trees()

        filled = [
            batch[_name(index)] if yes else one
            for index, (yes, one) in enumerate(zip(self._is_tensor, self._leaves, strict=True))
        ]
        return trees.tree_unflatten(filled, self._tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchStructure) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def flat_batch(batch: Any) -> tuple[dict[str, jax.Array], BatchStructure]:
    """Return a batch's tensors as arrays by name, and the way back to what they were in.

    Raises:
        TPUValidationError: There is no tensor in it.
    """
    import torch

    trees = torch_trees()

    leaves, tree = trees.tree_flatten(batch)
    arrays = {
        _name(index): to_array(one, copy=False)
        for index, one in enumerate(leaves)
        if isinstance(one, torch.Tensor)
    }
    if not arrays:
        raise TPUValidationError("a step needs tensors; this batch holds none.")
    return arrays, BatchStructure(tree, leaves)


def _name(index: int) -> str:
    return f"tensor {index}"
