"""What a module owns: parameters that train, and all other tensors that its forward reads."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from .arrays import shape_of, to_tensor


@dataclass(frozen=True)
class ModuleState:
    """The tensors of a module by path; what is shared (tied) is listed once.

    Attributes:
        trained: Parameters that require a gradient.
        carried: Frozen parameters, buffers, and tensors kept as plain attributes.
        aliases: Further names of a tensor that is listed: alias -> name.
    """

    trained: dict[str, Any]
    carried: dict[str, Any]
    aliases: dict[str, str]

    @classmethod
    def of(cls, module: Any) -> "ModuleState":
        """Read a module."""
        trained: dict[str, Any] = {}
        carried: dict[str, Any] = {}
        aliases: dict[str, str] = {}
        first_name: dict[int, str] = {}
        for dotted, tensor in _every_tensor(module):
            name = path_of(dotted)
            if id(tensor) in first_name:
                if first_name[id(tensor)] != name:
                    aliases[name] = first_name[id(tensor)]
                continue
            first_name[id(tensor)] = name
            (trained if tensor.requires_grad else carried)[name] = tensor
        return cls(trained, carried, aliases)

    @property
    def has_values(self) -> bool:
        """Whether every tensor is somewhere; a module made on torch's meta device is nowhere."""
        every = (*self.trained.values(), *self.carried.values())
        return not any(tensor.is_meta for tensor in every)

    def narrowed(self) -> list[str]:
        """Names of tensors of 64-bit floats, which become 32-bit ones."""
        every = {**self.trained, **self.carried}
        return [name for name, one in every.items() if str(one.dtype) == "torch.float64"]

    def shapes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shapes and formats of what is trained and what is carried."""
        return (
            {name: shape_of(tensor) for name, tensor in self.trained.items()},
            {name: shape_of(tensor) for name, tensor in self.carried.items()},
        )

    def write(self, params: Mapping[str, jax.Array], carried: Mapping[str, jax.Array]) -> None:
        """Write values into the module's own tensors; frozen parameters stay as they are."""
        import torch

        with torch.no_grad():
            for path, array in params.items():
                self.trained[path].copy_(to_tensor(array))
            for path, array in carried.items():
                if not isinstance(self.carried[path], torch.nn.Parameter):
                    self.carried[path].copy_(to_tensor(array))

    def whole(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The tensors under all of their names."""
        shared = {alias: tensors[name] for alias, name in self.aliases.items() if name in tensors}
        return {**tensors, **shared}


@contextmanager
def attributes_restored(module: Any) -> Generator[None]:
    """Give every module inside the attributes back that it has now.

    A forward may leave tensors on the module (`self.last = x`; an LSTM keeps a list of its
    weights). While it is traced those are placeholders, which must not outlive the trace.
    """
    kept = [
        (inner, dict(vars(inner)), [(one, list(one)) for one in _lists(inner)])
        for inner in module.modules()
    ]
    try:
        yield
    finally:
        for inner, attributes, lists in kept:
            vars(inner).clear()
            vars(inner).update(attributes)
            for one, members in lists:
                one[:] = members


def _lists(module: Any) -> list[list[Any]]:
    return [one for one in vars(module).values() if isinstance(one, list)]  # pyright: ignore[reportUnknownVariableType]  anything


def path_of(name: str) -> str:
    """Return a tensor's name as paths of parameters are written here; a "." of torch is a "/"."""
    return name.replace(".", "/")


def _every_tensor(module: Any) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers and plain attributes of a module and all inside it, shared ones too."""
    import torch

    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for prefix, inner in module.named_modules():
        for name, value in vars(inner).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}" if prefix else name, value
