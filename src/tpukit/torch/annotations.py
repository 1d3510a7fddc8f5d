"""Names that signatures use for what PyTorch users pass around."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union

if TYPE_CHECKING:
    import torch

# A tensor, a tuple of positional arguments, or a dict of them by name.
TorchInputs: TypeAlias = Union["torch.Tensor", tuple[Any, ...], Mapping[str, Any]]
# The same module comes back as the class that it is of.
Module = TypeVar("Module", bound="torch.nn.Module")
# Tensors in whatever holds them: tuples, dicts, dataclasses, a DataLoader.
Data = TypeVar("Data")
