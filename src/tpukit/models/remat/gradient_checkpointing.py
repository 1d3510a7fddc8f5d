"""Gradient checkpointing for existing models of any supported framework."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from ...errors import TPUModelError
from ..adapters.registry import kind_of
from .policy import NOTHING_SAVEABLE, RematPolicy

Model = TypeVar("Model")


def enable_gradient_checkpointing(
    model: Model,
    checkpoint_every_n_layers: int = 1,
    checkpoint_policy: str | RematPolicy = NOTHING_SAVEABLE,
) -> Model:
    """Return the same model, which recomputes activations in the backward pass.

    Values and gradients do not change. Memory falls, and the backward pass grows by up to one
    forward pass.

    Args:
        model: The reference `Transformer`; an nnx, linen or equinox module; a function of
            parameters; a pair (init, apply); a PyTorch module; or a model whose adapter was
            registered with `checkpoint=`.
        checkpoint_every_n_layers: Layers per checkpointed segment. Layers are recognised by the
            parameters they read: a list of blocks, numbered names ("Block_3"), or else the
            outermost modules.
        checkpoint_policy: What else to keep; see `RematPolicy`.

    Returns:
        A new model that shares its arrays with the given model, which is not changed.
    """
    policy = RematPolicy.parse(checkpoint_policy)
    if checkpoint_every_n_layers != 1:
        policy = dataclasses.replace(policy, every_n_layers=checkpoint_every_n_layers)
    return checkpoint_layers(model, policy)


def checkpoint_layers(model: Model, remat: RematPolicy) -> Model:
    """Return the model with a `RematPolicy`, or the model itself where the policy is inactive."""
    if not remat.active:
        return model
    kind = kind_of(model)
    if kind.checkpoint is None:
        raise TPUModelError(
            f"the adapter '{kind.name}' has no gradient checkpointing; use Workload(model, "
            f"remat='{remat}', …), or register the adapter with checkpoint=."
        )
    return kind.checkpoint(model, remat)


def saved_residual_bytes(function: Callable[..., Any], *args: Any) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, arguments included.

    Args:
        function: A differentiable function.
        args: Arrays or ShapeDtypeStructs; nothing is computed.
    """
    _, residuals = jax.eval_shape(lambda *values: jax.vjp(function, *values), *args)
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(residuals)}
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
