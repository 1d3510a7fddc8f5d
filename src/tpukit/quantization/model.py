"""`QuantizedModel`: a model whose matrices stay quantized, called and sharded like any other."""

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
from ..models.stored.parts import Part, part_matrix
from ..models.stored.placement import on_host
from ..models.stored.running import Activations, dense_parameters, with_stored_parameters
from ..models.transformer.config import TransformerConfig
from .subject import Subject


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("params",),
    meta_fields=("subject", "activations"),
)
@dataclass(frozen=True, eq=False)  # called by identity, as jax.jit asks of what it is given
class QuantizedModel:
    """A quantized model; `model(inputs)` returns outputs like the full model's.

    It is a tree of arrays, so it goes through `jax.jit`, `jax.device_put` and checkpoints; a
    quantized matrix's arrays shard as the matrix does (codes by inputs / length and outputs,
    scales by outputs). `Generator(model.config, model.params)` generates from a reference
    transformer.

    Attributes:
        params: The model's tree of parameters, with a `StoredParameter` for each quantized one.
        subject: The full model.
        activations: "wide", or "int8" to round activations before a quantized matmul.
    """

    params: PyTree
    subject: Subject
    activations: Activations = "wide"

    def __call__(self, *inputs: PyTree) -> PyTree:
        """Run the model on a batch of inputs.

        An equinox module is called on every row of the batch. Plain functions get the batch
        unchanged. Other models get `inputs`, an array or a mapping of names to arrays.
        """
        return self.apply(self.params, self.subject.inputs(inputs))

    @property
    def apply(self) -> Callable[[PyTree, PyTree], PyTree]:
        """Return outputs of a batch for quantized or full parameters."""
        return with_stored_parameters(self.subject.apply, self.activations)

    @property
    def config(self) -> TransformerConfig | None:
        """The configuration of a reference transformer; None for other models."""
        return self.subject.config

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters as stored."""
        return array_bytes(self.params)

    def dequantized(self) -> PyTree:
        """Return the parameters as arrays of the model's original dtypes."""
        return dense_parameters(self.params)


def matrix_of(params: PyTree, matrix: ModelMatrix) -> jax.Array:
    """Return the (inputs, outputs) array of one matrix on one device."""
    axes, parameter = matrix.axes, parameter_of(params, matrix)
    index: list[Any] = [slice(None)] * parameter.ndim
    for axis, at in zip(axes.stack, matrix.index, strict=True):
        index[axis] = at
    array = parameter[tuple(index)]
    place = getattr(parameter, "sharding", None)  # None in a traced program and on the host
    if place is not None and len(place.device_set) > 1:
        array = on_host(array)
    kept = [axis for axis in range(parameter.ndim) if axis not in axes.stack]
    order = [kept.index(axis) for axis in (*axes.inputs, *axes.outputs)]
    return jnp.transpose(jnp.asarray(array), order).reshape(matrix.shape)


def parameter_of(params: PyTree, matrix: ModelMatrix) -> PyTree:
    """Return the parameter that contains a matrix."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if path_text(path) == matrix.path:
            return leaf
    raise KeyError(matrix.path)


def with_parts(params: PyTree, matrices: ModelMatrices, parts: dict[str, Part]) -> PyTree:
    """Return the parameters with some matrices stored as `parts`, by name."""
    by_path: dict[str, list[ModelMatrix]] = {}
    for matrix in matrices.found:
        by_path.setdefault(matrix.path, []).append(matrix)

    def kept(path: Any, leaf: Any) -> Any:
        own = by_path.get(path_text(path), [])
        if not any(matrix.name in parts for matrix in own):
            return leaf
        ordered = sorted(own, key=lambda matrix: matrix.number)
        arrays = matrices_of(leaf, own[0].axes)
        stored = tuple(parts.get(matrix.name, arrays[matrix.number]) for matrix in ordered)
        return store(leaf, stored, own[0].axes)

    return jax.tree_util.tree_map_with_path(kept, params, is_leaf=is_stored)


def replaced(params: PyTree, matrices: ModelMatrices, parts: dict[str, Part]) -> PyTree:
    """Return the parameters as arrays, with the dequantized `parts` for some matrices."""
    wide: dict[str, Part] = {name: part_matrix(part) for name, part in parts.items()}
    return dense_parameters(with_parts(params, matrices, wide))
