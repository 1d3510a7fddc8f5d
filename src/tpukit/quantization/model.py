"""`QuantizedModel`: a model whose matrices stay quantized; called, traced and sharded like any."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..annotations import PyTree
from ..kernels.ops.quantized_matmul.weight import array_bytes
from ..models.stored.calibration import ModelMatrices, ModelMatrix, path_text
from ..models.stored.parameter import is_stored, matrices_of, store
from ..models.stored.part import Part, part_matrix
from ..models.stored.running import Activations, dense_parameters, with_stored_parameters
from ..models.stored.spread import on_host
from ..models.transformer.config import TransformerConfig
from .subject import Subject


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("params",),
    meta_fields=("subject", "activations"),
)
@dataclass(frozen=True, eq=False)  # called by identity, as jax.jit asks of what it is given
class QuantizedModel:
    """A quantized model: `model(inputs)` gives what the model it was made of gives.

    It is a tree of arrays, so it goes through `jax.jit`, `jax.device_put` and checkpoints; a
    quantized matrix's arrays shard as the matrix does (codes by inputs / length and outputs,
    scales by outputs). `Generator(model.config, model.params)` generates from a reference
    transformer.

    Attributes:
        params: The model's own tree of parameters, a `StoredParameter` in place of each that was
            quantized.
        subject: The model it was made of.
        activations: "wide", or "int8": what multiplies a quantized matrix is rounded first.
    """

    params: PyTree
    subject: Subject
    activations: Activations = "wide"

    def __call__(self, *inputs: PyTree) -> PyTree:
        """What the model makes of a batch of inputs.

        An equinox module is called on every row of the batch; plain functions are given the batch
        as it is; other models `inputs`, an array or a mapping of names to arrays.
        """
        return self.apply(self.params, self.subject.inputs(inputs))

    @property
    def apply(self) -> Callable[[PyTree, Any], Any]:
        """(params, batch) -> outputs, for parameters stored or not."""
        return with_stored_parameters(self.subject.apply, self.activations)

    @property
    def config(self) -> TransformerConfig | None:
        """Of a reference transformer."""
        return self.subject.config

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters as they are kept."""
        return array_bytes(self.params)

    def dequantized(self) -> PyTree:
        """The parameters as arrays of the dtypes the model had."""
        return dense_parameters(self.params)


def matrix_of(params: PyTree, matrix: ModelMatrix) -> jax.Array:
    """The (inputs, outputs) array of one matrix, whole on one device."""
    axes, found = matrix.axes, parameter_of(params, matrix)
    index: list[Any] = [slice(None)] * found.ndim
    for axis, at in zip(axes.stack, matrix.index, strict=True):
        index[axis] = at
    one = found[tuple(index)]
    place = getattr(found, "sharding", None)  # there is none in a traced program, nor on the host
    if place is not None and len(place.device_set) > 1:
        one = on_host(one)
    kept = [axis for axis in range(found.ndim) if axis not in axes.stack]
    order = [kept.index(axis) for axis in (*axes.inputs, *axes.outputs)]
    return jnp.transpose(jnp.asarray(one), order).reshape(matrix.shape)


def parameter_of(params: PyTree, matrix: ModelMatrix) -> Any:
    """The parameter that a matrix is in."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if path_text(path) == matrix.path:
            return leaf
    raise KeyError(matrix.path)


def with_parts(params: PyTree, matrices: ModelMatrices, parts: dict[str, Part]) -> PyTree:
    """The parameters with some matrices stored as `parts`, by name."""
    by_path: dict[str, list[ModelMatrix]] = {}
    for one in matrices.found:
        by_path.setdefault(one.path, []).append(one)

    def kept(path: Any, leaf: Any) -> Any:
        own = by_path.get(path_text(path), [])
        if not any(one.name in parts for one in own):
            return leaf
        ordered = sorted(own, key=lambda one: one.number)
        arrays = matrices_of(leaf, own[0].axes)
        whole = tuple(parts.get(one.name, arrays[one.number]) for one in ordered)
        return store(leaf, whole, own[0].axes)

    return jax.tree_util.tree_map_with_path(kept, params, is_leaf=is_stored)


def replaced(params: PyTree, matrices: ModelMatrices, parts: dict[str, Part]) -> PyTree:
    """The parameters as arrays, with what `parts` stand for in place of some matrices."""
    wide: dict[str, Part] = {name: part_matrix(part) for name, part in parts.items()}
    return dense_parameters(with_parts(params, matrices, wide))
