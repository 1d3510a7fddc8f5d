"""Gradient checkpoints between the layers of a flax nnx module."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flax import nnx

from ...errors import TPUModelError
from ..transformer.model import Transformer
from .policy import RematPolicy


class CheckpointedLayers(nnx.List[Any]):
    """A list of layers that hands out checkpointed segments when a model loops over it.

    Names and positions of the parameters stay those of the plain list.
    """

    def __init__(self, layers: Iterator[Any] | list[Any], remat: RematPolicy) -> None:
        super().__init__(layers)
        self.remat = remat

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        """One callable for each segment of `remat.every_n_layers` layers."""
        size = self.remat.every_n_layers
        layers = [self[index] for index in range(len(self))]
        for start in range(0, len(layers), size):
            yield partial(_run_segment, self.remat, layers[start : start + size])


def _run_segment(
    remat: RematPolicy, layers: list[Any], x: Any, *others: Any, **options: Any
) -> Any:
    definition, state = nnx.split(nnx.List(layers))

    def run(state: Any, x: Any, *others: Any) -> Any:
        members = nnx.merge(definition, state)
        for index in range(len(layers)):
            x = members[index](x, *others, **options)
        return x, nnx.state(members)

    x, changed = remat.wrap(run)(state, x, *others)
    nnx.update(nnx.List(layers), changed)
    return x


def checkpoint_nnx(model: nnx.Module, remat: RematPolicy) -> nnx.Module:
    """The same module with checkpoints between the layers of every `nnx.List` in it.

    The reference transformer sets its own.

    Raises:
        TPUModelError: It keeps no layers in an `nnx.List`.
    """
    copy = nnx.merge(*nnx.split(model))
    if isinstance(copy, Transformer):
        copy.execution = copy.execution.replace(remat=remat)
        return copy
    found = False
    for _, module in list(nnx.iter_modules(copy)):
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.List) and not isinstance(value, CheckpointedLayers):
                layers: list[Any] = list(value)
                if all(map(callable, layers)) and any(isinstance(x, nnx.Module) for x in layers):
                    setattr(module, name, CheckpointedLayers(layers, remat))
                    found = True
    if not found:
        raise TPUModelError(
            f"{type(model).__name__} has no nnx.List of layers to put checkpoints between; keep "
            "its layers in one and loop over it, or wrap each layer's call with nnx.remat."
        )
    return copy
