"""Where the arrays of stored parameters lie on a mesh: codes and scales like their matrix."""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ...annotations import PyTree
from ...errors import ShardingError
from ...kernels.ops.quantized_matmul.weight import QuantizedWeight
from .parameter import StoredParameter, is_stored
from .part import Part
from .part_stack import PartRuns, PartStack
from .product import MatrixAxes


def stored_shardings(params: PyTree, shardings: PyTree, *, or_whole: bool = False) -> PyTree:
    """Shardings for a tree with stored parameters, from those of the same as arrays.

    Args:
        params: Arrays or their shapes, stored parameters among them.
        shardings: A NamedSharding for every parameter.
        or_whole: Whether what cannot be cut so lies whole on every device, instead of an error.

    Raises:
        ShardingError: A cut would go through what one code or word holds, or between matrices.
    """

    def one(path: Any, leaf: Any, sharding: NamedSharding) -> Any:
        if not is_stored(leaf):
            return sharding
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        try:
            return _of_parameter(name, leaf, sharding)
        except ShardingError:
            if not or_whole:
                raise
        return jax.tree.map(lambda _: NamedSharding(sharding.mesh, PartitionSpec()), leaf)

    return jax.tree_util.tree_map_with_path(one, params, shardings, is_leaf=is_stored)


def place_stored(params: PyTree, shardings: PyTree) -> PyTree:
    """Put parameters, stored ones among them, where the shardings of the same arrays say.

    Raises:
        ShardingError: See `stored_shardings`.
    """
    return jax.device_put(params, stored_shardings(params, shardings))


def with_known_shardings(params: PyTree, shardings: PyTree) -> PyTree:
    """Parameters whose stacks know where they lie, from the shardings of the same arrays."""

    def one(leaf: Any, placed: Any) -> Any:
        if not is_stored(leaf) or isinstance(leaf.parts, tuple):
            return leaf
        return replace(leaf, parts=_knowing(leaf.parts, placed.parts))

    places = stored_shardings(params, shardings, or_whole=True)
    return jax.tree.map(one, params, places, is_leaf=is_stored)


def place_part(part: Part, axes: MatrixAxes, sharding: Any) -> Part:
    """Put one matrix of a parameter where the parameter lies; on one device it stays as it is.

    Where a cut would go through what one code holds, it lies whole on every device.
    """
    if not isinstance(sharding, NamedSharding):
        return part
    try:
        place = _of_part(part, NamedSharding(sharding.mesh, _matrix_spec("", axes, sharding)))
    except ShardingError:
        place = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.device_put(part, place)


def _knowing(parts: PartStack | PartRuns, placed: Any) -> PartStack | PartRuns:
    if isinstance(parts, PartStack):
        return replace(parts, shardings=placed.part)
    pairs = zip(parts.runs, placed.runs, strict=True)
    return PartRuns(tuple(replace(run, shardings=place.part) for run, place in pairs))


def _of_parameter(name: str, stored: StoredParameter, sharding: NamedSharding) -> StoredParameter:
    mesh, matrix = sharding.mesh, _matrix_spec(name, stored.axes, sharding)
    try:
        stack = NamedSharding(mesh, PartitionSpec(None, *matrix))
        match stored.parts:
            case PartStack() as parts:
                placed: Any = _of_stack(parts, stack)
            case PartRuns(runs):
                placed = PartRuns(tuple(_of_stack(run, stack) for run in runs))
            case parts:
                placed = tuple(_of_part(part, NamedSharding(mesh, matrix)) for part in parts)
    except ShardingError as error:
        raise ShardingError(f"{name}: {error}") from None
    return replace(stored, parts=placed)


def _matrix_spec(name: str, axes: MatrixAxes, sharding: NamedSharding) -> PartitionSpec:
    """How each matrix of a parameter is cut."""
    mesh = sharding.mesh
    spec = (*sharding.spec, *(None,) * (len(axes.shape) - len(sharding.spec)))
    for axis in axes.stack:
        if _pieces(mesh, spec[axis]) > 1:
            raise ShardingError(
                f"{name} is kept as {axes.count} quantized matrices, and the mesh would deal them "
                f"out along {spec[axis]}; use fsdp or tensor axes, which cut each of them."
            )
    groups = (axes.inputs, axes.outputs)
    # Of several axes that are one side of the matrix, only the first can be cut into pieces.
    tall, wide = (spec[group[0]] if len(group) else None for group in groups)
    if any(_pieces(mesh, spec[axis]) > 1 for group in groups for axis in group[1:]):
        raise ShardingError(
            f"{name} {axes.shape} would be cut through the middle of its matrices by "
            f"{sharding.spec}; use another mesh."
        )
    return PartitionSpec(tall, wide)


def _of_stack(stack: PartStack, sharding: NamedSharding) -> PartStack:
    return replace(stack, part=_of_part(stack.part, sharding))


def _of_part(part: Any, sharding: NamedSharding) -> Any:
    if isinstance(part, QuantizedWeight):
        return weight_shardings(part, sharding)
    return part.shardings(sharding) if hasattr(part, "shardings") else sharding


def weight_shardings(weight: QuantizedWeight, sharding: NamedSharding) -> QuantizedWeight:
    """Shardings of a weight's arrays, from that of its matrix, or of a stack of matrices.

    Raises:
        ShardingError: A cut would go through a word.
    """
    *first, tall, wide = sharding.spec
    pieces, columns = _pieces(sharding.mesh, tall), _pieces(sharding.mesh, wide)
    rows = weight.data.shape[-2]
    if rows % pieces or weight.shape[1] % columns:
        raise ShardingError(
            f"an {weight.format} matrix {weight.shape} has {rows} words of rows and "
            f"{weight.shape[1]} columns, which {pieces} × {columns} devices cannot share evenly; "
            "use a mesh that divides them."
        )

    def at(*axes: Any) -> Any:
        return NamedSharding(sharding.mesh, PartitionSpec(*first, *axes))

    whole = weight.scales.shape[-2] % pieces
    return replace(
        weight,
        data=at(*(None,) * (weight.data.ndim - 2 - len(first)), tall, wide),
        scales=at(None if whole else tall, wide),
        codebook=None if weight.codebook is None else at(),
    )


def _pieces(mesh: Any, axes: Any) -> int:
    names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    pieces = 1
    for name in names:
        pieces *= mesh.shape[name]
    return pieces
