"""Computing in bfloat16 on weights that stay float32: they are what an optimizer moves.

A class of the same name is put in front of a module's own, so state dicts, `isinstance` and
attributes stay as they were.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ...models.adapters.torch_module.environment import torch_trees


def narrow_linear_layers(module: Any) -> list[str]:
    """Let the products of every `nn.Linear` inside run in bfloat16, and say of which."""
    import torch

    found = [
        (name, inner)
        for name, inner in module.named_modules()
        if isinstance(inner, torch.nn.Linear) and inner.weight.dtype == torch.float32
    ]
    for _, inner in found:
        put_in_front(inner, NarrowLayer)
    return [name or type(module).__name__ for name, _ in found]


def narrow_everything(module: Any) -> None:
    """Let a module and all inside it run in bfloat16; float32 comes out where it came out before.

    Buffers keep their format: running statistics and tables of positions need the digits.
    """
    put_in_front(module, NarrowLayer)


def put_in_front(module: Any, part: type) -> None:
    """Give a module a class of the same name that begins with `part`."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (part, kind), {"__module__": kind.__module__})


class NarrowLayer:
    """The first base of what computes in bfloat16."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Run the module's own forward on narrow inputs and weights."""
        import torch

        arguments, options = _cast((arguments, options), torch.float32, torch.bfloat16)
        with _parameters_cast(self, torch.bfloat16):
            outputs = super().forward(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of the user's class
        return _cast(outputs, torch.bfloat16, torch.float32)


def _cast(tree: Any, source: Any, target: Any) -> Any:
    import torch

    def one(tensor: Any) -> Any:
        return tensor.to(target) if tensor.dtype == source else tensor

    return torch_trees().tree_map_only(torch.Tensor, one, tree)


@contextmanager
def _parameters_cast(module: Any, dtype: Any) -> Generator[None]:
    """Show a module and all inside it other parameters: its own, cast, with their gradients."""
    import torch

    kept = [(inner, dict(inner._parameters)) for inner in module.modules()]
    try:
        for inner, own in kept:
            for name, one in own.items():
                if one is not None and one.dtype == torch.float32:
                    inner._parameters[name] = one.to(dtype)
            _list_weights_again(inner)
        yield
    finally:
        for inner, own in kept:
            inner._parameters.update(own)
            _list_weights_again(inner)


def _list_weights_again(module: Any) -> None:
    """Renew the list of weights that recurrent layers keep beside their parameters."""
    names = getattr(module, "_flat_weights_names", None)
    if names is not None:
        module._flat_weights = [getattr(module, name, None) for name in names]
