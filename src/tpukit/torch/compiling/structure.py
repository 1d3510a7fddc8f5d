"""What two modules must have in common for one program to serve both: all but their values."""

import dataclasses
import enum
import types
from collections.abc import Hashable, Mapping
from typing import Any

from ...models.adapters.torch_module.state import ModuleState

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Code, and what names a format: each is equal only to itself, and says all about itself.
_ITSELF = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


class Same:
    """A key that only one object has; it keeps the object, so that no other gets its id."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def module_structure(module: Any) -> Hashable:
    """Return a key that is equal for modules which trace to the same program.

    It holds the tree of classes with their settings, and names, shapes, formats and ties of all
    tensors. Values of tensors are arguments of the program and no part of it. Where a module keeps
    something whose content cannot be told, such as a tensor in a list, the key is its own alone.
    """
    state = ModuleState.of(module)
    tensors = tuple(
        (name, tuple(one.shape), str(one.dtype), one.requires_grad)
        for name, one in (*state.trained.items(), *state.carried.items())
    )
    parts = tuple((name, type(one), _settings(one)) for name, one in module.named_modules())
    return parts, tensors, tuple(state.aliases.items())


def _settings(module: Any) -> Hashable:
    """Return what a module keeps beside tensors and other modules, hooks included."""
    import torch

    # In training mode or not is part of each call, and changes between two.
    skipped = ("_parameters", "_buffers", "_modules", "training")
    return tuple(
        (name, _described(value))
        for name, value in vars(module).items()
        if name not in skipped and not isinstance(value, torch.Tensor)
    )


def _described(value: Any) -> Hashable:
    import torch

    if isinstance(value, _PLAIN):
        return type(value), value  # 1, 1.0 and True are equal, and make different programs
    if isinstance(value, (*_ITSELF, enum.Enum, torch.dtype, torch.device)):
        return value
    if isinstance(value, tuple | list):
        return type(value), tuple(_described(one) for one in value)
    if isinstance(value, Mapping):
        return type(value), tuple((_described(k), _described(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_described(one) for one in value)
    if dataclasses.is_dataclass(value):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return type(value), _described(fields)
    # Configurations of Hugging Face: they write themselves as plain data.
    if callable(getattr(value, "to_dict", None)):
        return type(value), _described(value.to_dict())
    return Same(value)
