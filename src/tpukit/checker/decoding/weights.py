"""Parameters of generation as a server keeps them: shapes of narrow ones where they would lie."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...annotations import PyTree
from ...errors import TPUValidationError
from ...hardware.formats import FLOAT8_E4M3FN
from ...kernels.ops.quantized_matmul.packing import quantize_weight
from ...models.generation.programs import DecodingPrograms
from ...models.stored.calibration import find_matrices, path_text
from ...models.stored.parameter import PartStack, StoredParameter
from ...models.stored.placement import stored_shardings
from ...quantization.plan import INTEGERS, SKIP, make_plan
from ...quantization.subject import make_subject

_FEW_TOKENS = 8  # any number shows which parameters are matrices


def stored_params(programs: DecodingPrograms, format: str) -> PyTree:
    """Shapes and shardings of parameters whose matrices are in `format`, as `quantize` keeps them.

    Raises:
        TPUValidationError: Nothing keeps weights so that generation runs on them.
        ShardingError: The mesh would cut through what one word holds.
    """
    if format not in INTEGERS:
        raise TPUValidationError(
            f"weights in {format!r} cannot be compiled without their codebooks; use one of "
            f"{', '.join(INTEGERS)}."
        )
    whole = programs.abstract_params()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), whole)
    tokens = jnp.zeros((1, _FEW_TOKENS), jnp.int32)
    # With room for every expert their products are plain ones, whose matrices can be told.
    subject = make_subject(programs.model.replace(routing="capacity"), shapes, tokens)
    matrices = find_matrices(subject.apply, shapes, subject.batch(tokens))
    plan = make_plan(matrices, format, skip_ends=False)
    axes = {one.path: one.axes for one in matrices.found if plan.formats[one.name] != SKIP}

    def kept(path: Any, leaf: Any) -> Any:
        own = axes.get(path_text(path))
        if own is None:
            return leaf
        matrix = jax.ShapeDtypeStruct((own.rows, own.columns), leaf.dtype)
        part = jax.eval_shape(partial(quantize_weight, format=format), matrix)  # pyright: ignore[reportArgumentType]
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
    """The same with matrices of layers in fp8, as products of `matmul: float8_static` take them.

    They have one constant scale; published servers have one for each column. Tables, norms and
    routers stay as they are.
    """

    def held(path: Any, leaf: Any) -> Any:
        name = path_text(path)
        is_matrix = name.startswith("layers") and leaf.ndim >= 3 and "router" not in name
        dtype = jnp.dtype(FLOAT8_E4M3FN.name) if is_matrix else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    return jax.tree_util.tree_map_with_path(held, programs.abstract_params())
