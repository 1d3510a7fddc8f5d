"""Parameters of generation as a server keeps them: shapes of narrow ones where they would lie."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...annotations import PyTree
from ...errors import TPUValidationError
from ...hardware.formats import FLOAT8_E4M3FN
from ...hardware.stored_formats import rounded_formats
from ...kernels.ops.quantized_matmul.weight import quantize_weight
from ...models.generation.programs import DecodingPrograms
from ...models.stored.calibration import find_matrices, path_text
from ...models.stored.parameter import StoredParameter
from ...models.stored.parts import PartStack
from ...models.stored.placement import stored_shardings
from ...models.stored.view import MatrixAxes
from ...quantization.plan import SKIP, make_plan
from ...quantization.subject import make_subject

_FEW_TOKENS = 8  # any number shows which parameters are matrices


def stored_params(programs: DecodingPrograms, format: str) -> PyTree:
    """Return shapes and shardings of parameters that `quantize` stored in `format`.

    Raises:
        TPUValidationError: Generation cannot run with this format.
        ShardingError: The mesh would split the values that are packed into one word.
    """
    if format not in rounded_formats():
        raise TPUValidationError(
            f"weights in {format!r} cannot be compiled without their codebooks; use one of "
            f"{', '.join(rounded_formats())}."
        )
    shapes = _shapes(programs)
    axes = _narrow_matrices(programs, shapes, format)

    def kept(path: Any, leaf: Any) -> Any:
        own = axes.get(path_text(path))
        if own is None:
            return leaf
        matrix = jax.ShapeDtypeStruct((own.rows, own.columns), leaf.dtype)
        part = jax.eval_shape(partial(quantize_weight, format=format), matrix)
        stack = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct((own.count, *one.shape), one.dtype), part
        )
        parts: Any = PartStack(stack, own.count) if own.count > 1 else (part,)
        return StoredParameter(parts, own, jnp.dtype(leaf.dtype).name)

    stored = jax.tree_util.tree_map_with_path(kept, shapes)
    if programs.mesh is None:
        return stored
    places = stored_shardings(stored, programs.layout.shardings)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        stored,
        places,
    )


def held_params(programs: DecodingPrograms) -> PyTree:
    """Return the parameters with layer matrices in fp8, for `matmul: float8_static`.

    Each matrix has one constant scale; published servers use one per column.
    """
    narrow = _narrow_matrices(programs, _shapes(programs), "fp8")

    def held(path: Any, leaf: Any) -> Any:
        dtype = jnp.dtype(FLOAT8_E4M3FN.name) if path_text(path) in narrow else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    return jax.tree_util.tree_map_with_path(held, programs.abstract_params())


def _shapes(programs: DecodingPrograms) -> PyTree:
    whole = programs.abstract_params()
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), whole)


def _narrow_matrices(
    programs: DecodingPrograms, shapes: PyTree, format: str
) -> dict[str, MatrixAxes]:
    """Return the parameters, by path, that `quantize` would store in a format."""
    tokens = jnp.zeros((1, _FEW_TOKENS), jnp.int32)
    subject = make_subject(programs.model, shapes, tokens)
    matrices = find_matrices(subject.apply, shapes, subject.batch(tokens))
    plan = make_plan(matrices, format, skip_ends=False)
    return {one.path: one.axes for one in matrices.found if plan.formats[one.name] != SKIP}
