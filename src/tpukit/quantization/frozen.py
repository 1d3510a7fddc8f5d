"""What a model's own parameters are kept as while thin matrices beside them are trained."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..annotations import PyTree
from ..models.stored.parameter import with_stacks
from .files.model_files import load_quantized
from .uniform import quantize_for_tpu


def rounded_base(
    model: Any, format: Any, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> Callable[[PyTree], PyTree]:
    """A function that rounds a model's matrices to the nearest values of a format.

    It can be traced. What `quantize_for_tpu` leaves (embeddings, norms, routers) stays. Matrices of
    all layers lie side by side, as in a folder that is read: if every step laid them so for its
    loop over layers, they would be there twice.

    Args:
        model: See `quantize_for_tpu`.
        format: "int8", "int4" or "fp8".
        batch: Shapes of what the model is called with.
    """

    def keep(params: PyTree) -> PyTree:
        inputs = {name: jnp.zeros(one.shape, one.dtype) for name, one in batch.items()}
        made = quantize_for_tpu(model, params=params, inputs=inputs, format=format)
        return with_stacks(made.params)

    return keep


def saved_base(folder: str) -> Callable[[PyTree], PyTree]:
    """A function that gives parameters of the form that a quantized folder holds, all zeros.

    It is for shapes; the values are the folder's (`load_quantized`).
    """
    held = load_quantized(folder).params
    shapes = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), held)
    return lambda _: jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
