"""Put gradient checkpoints on a model that exists already: nnx, linen or plain functions."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
from flax import linen, nnx

from ...errors import TPUModelError
from ..transformer.model import Transformer
from .policy import RematPolicy


def enable_gradient_checkpointing(
    model: Any,
    checkpoint_every_n_layers: int = 1,
    checkpoint_policy: str | RematPolicy = "nothing_saveable",
) -> Any:
    """The same model, computing activations again in the backward pass instead of keeping them.

    Values and gradients do not change; memory falls and the backward pass grows by up to one
    forward pass.

    Args:
        model: The reference `Transformer`; an nnx module that loops over an `nnx.List` of layers
            (or an `nnx.Sequential`); a linen module; or a function.
        checkpoint_every_n_layers: Keep the activations between every so many layers. A linen
            module or a function is one segment.
        checkpoint_policy: What else to keep; see `RematPolicy`.

    Returns:
        A new model that shares its arrays with the one given, which is left as it was.
    """
    policy = RematPolicy.parse(checkpoint_policy)
    if checkpoint_every_n_layers != 1:
        policy = dataclasses.replace(policy, every_n_layers=checkpoint_every_n_layers)
    return checkpoint_layers(model, policy)


def checkpoint_layers(model: Any, remat: RematPolicy) -> Any:
    """Apply a whole `RematPolicy` to a model; without checkpoints in it, the model itself."""
    if not remat.active:
        return model
    if isinstance(model, Transformer):
        copy = nnx.merge(*nnx.split(model))
        copy.execution = model.execution.replace(remat=remat)
        return copy
    if isinstance(model, nnx.Module):
        return _checkpoint_nnx(model, remat)
    if remat.every_n_layers > 1:
        raise TPUModelError(
            f"every_n_layers={remat.every_n_layers} needs layers that can be seen, and a "
            f"{type(model).__name__} hides them; checkpoint each group of layers by itself, or use "
            "every_n_layers=1 for the whole of it."
        )
    if isinstance(model, linen.Module):
        return _checkpoint_linen(model, remat)
    if callable(model):
        return remat.wrap(model)
    raise TPUModelError(
        f"{type(model).__name__} is not something that can be checkpointed; pass an nnx or linen "
        "module, or a function."
    )


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
        layers = [self[place] for place in range(len(self))]
        for start in range(0, len(layers), size):
            yield partial(_run_segment, self.remat, layers[start : start + size])


def _run_segment(
    remat: RematPolicy, layers: list[Any], x: Any, *others: Any, **options: Any
) -> Any:
    definition, state = nnx.split(nnx.List(layers))

    def run(state: Any, x: Any, *others: Any) -> Any:
        members = nnx.merge(definition, state)
        for place in range(len(layers)):
            x = members[place](x, *others, **options)
        return x, nnx.state(members)

    x, changed = remat.wrap(run)(state, x, *others)
    nnx.update(nnx.List(layers), changed)
    return x


def _checkpoint_nnx(model: nnx.Module, remat: RematPolicy) -> nnx.Module:
    copy = nnx.merge(*nnx.split(model))
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


def _checkpoint_linen(model: linen.Module, remat: RematPolicy) -> linen.Module:
    checkpointed: Any = linen.remat(type(model), policy=remat.jax_policy())
    fields = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)  # pyright: ignore[reportArgumentType]  linen modules are dataclasses
        if field.init and field.name not in ("parent", "name")
    }
    return checkpointed(**fields, name=model.name)


def saved_residual_bytes(function: Callable[..., Any], *args: Any) -> int:
    """Bytes the forward pass of `function` keeps for its backward pass, arguments included.

    Args:
        function: A differentiable function.
        args: Arrays or ShapeDtypeStructs; nothing is computed.
    """
    _, residuals = jax.eval_shape(lambda *values: jax.vjp(function, *values), *args)
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(residuals)}
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
