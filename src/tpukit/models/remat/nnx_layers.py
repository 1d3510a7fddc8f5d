"""Gradient checkpoints between the layers of a flax nnx module."""

from typing import Any

from flax import nnx

from ..transformer.model import Transformer
from .policy import RematPolicy
from .segments import checkpoint_segments


def checkpoint_nnx(model: nnx.Module, remat: RematPolicy) -> nnx.Module:
    """The same module, called in checkpointed segments; the reference transformer sets its own.

    Names and positions of the parameters stay. Only `__call__` changes.
    """
    copy = nnx.merge(*nnx.split(model))
    if isinstance(copy, Transformer):
        copy.execution = copy.execution.replace(remat=remat)
        return copy
    copy.__class__ = _checkpointed(type(model), remat)
    return copy


def _checkpointed(kind: type[Any], remat: RematPolicy) -> type[Any]:
    """The class with a `__call__` in segments."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        definition, params, rest = nnx.split(self, nnx.Param, ...)

        def run(params: Any, rest: Any, *args: Any, **options: Any) -> Any:
            model = nnx.merge(definition, params, rest)
            outputs = kind.__call__(model, *args, **options)
            return outputs, nnx.split(model, nnx.Param, ...)[2]

        outputs, changed = checkpoint_segments(run, remat)(params, rest, *args, **options)
        nnx.update(self, changed)
        return outputs

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
