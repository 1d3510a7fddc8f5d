"""Where stored parameters and calibration batches are placed on a mesh."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...annotations import PyTree
from ...errors import MeshError, ShardingError, TPUValidationError
from ...kernels.ops.quantized_matmul.weight import QuantizedWeight
from ...parallel.mesh.axes import BATCH_ROLES, axes_with_role, role_of
from ...parallel.rebalancing import reshard
from ...parallel.sharding.layout import Layout, make_layout
from ...parallel.sharding.strategy import strategy_for
from ..adapters import ModelAdapter, head_counts_of
from .parameter import StoredParameter, is_stored
from .parts import Part, PartRuns, PartStack
from .view import MatrixAxes


def stored_shardings(params: PyTree, shardings: PyTree, *, or_whole: bool = False) -> PyTree:
    """Return shardings of a tree with stored parameters, from shardings of plain arrays.

    Args:
        params: Arrays or shapes, with stored parameters among them.
        shardings: A NamedSharding for every parameter.
        or_whole: Whether a parameter that cannot be sharded is replicated instead of an error.

    Raises:
        ShardingError: A shard boundary would split a code or a word, or separate matrices.
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
    """Return parameters, with stored ones among them, placed by shardings of plain arrays.

    Raises:
        ShardingError: See `stored_shardings`.
    """
    return jax.device_put(params, stored_shardings(params, shardings))


def with_known_shardings(params: PyTree, shardings: PyTree) -> PyTree:
    """Return parameters whose stacks have known shardings, from shardings of plain arrays."""

    def one(leaf: Any, placed: Any) -> Any:
        if not is_stored(leaf) or isinstance(leaf.parts, tuple):
            return leaf
        return replace(leaf, parts=_knowing(leaf.parts, placed.parts))

    places = stored_shardings(params, shardings, or_whole=True)
    return jax.tree.map(one, params, places, is_leaf=is_stored)


def place_part(part: Part, axes: MatrixAxes, sharding: Any) -> Part:
    """Return one matrix placed by the sharding of its parameter.

    The matrix is replicated where a shard boundary would split a code. On one device nothing
    changes.
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
    """Return the partition spec of each matrix of a parameter."""
    mesh = sharding.mesh
    spec = (*sharding.spec, *(None,) * (len(axes.shape) - len(sharding.spec)))
    for axis in axes.stack:
        if _pieces(mesh, spec[axis]) > 1:
            raise ShardingError(
                f"{name} is kept as {axes.count} quantized matrices, which the mesh axis "
                f"{spec[axis]} would distribute; use fsdp or tensor axes, which shard each matrix."
            )
    groups = (axes.inputs, axes.outputs)
    # Where several axes form one side of the matrix, only the first can be sharded.
    tall, wide = (spec[group[0]] if len(group) else None for group in groups)
    if any(_pieces(mesh, spec[axis]) > 1 for group in groups for axis in group[1:]):
        raise ShardingError(
            f"{name} {axes.shape} cannot be sharded by {sharding.spec}, because that splits an "
            "inner axis of its matrices; use another mesh."
        )
    return PartitionSpec(tall, wide)


def _of_stack(stack: PartStack, sharding: NamedSharding) -> PartStack:
    return replace(stack, part=_of_part(stack.part, sharding))


def _of_part(part: Any, sharding: NamedSharding) -> Any:
    if isinstance(part, QuantizedWeight):
        return weight_shardings(part, sharding)
    return part.shardings(sharding) if hasattr(part, "shardings") else sharding


def weight_shardings(weight: QuantizedWeight, sharding: NamedSharding) -> QuantizedWeight:
    """Return the shardings of a weight's arrays for the sharding of its matrix or of a stack.

    Raises:
        ShardingError: A shard boundary would split a word.
    """
    *first, tall, wide = sharding.spec
    pieces, columns = _pieces(sharding.mesh, tall), _pieces(sharding.mesh, wide)
    rows = weight.data.shape[-2]
    if rows % pieces or weight.shape[1] % columns:
        raise ShardingError(
            f"an {weight.format} matrix {weight.shape} has {rows} rows of words and "
            f"{weight.shape[1]} columns, which {pieces} × {columns} devices do not divide; use a "
            "mesh that does."
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


_ROLES = ("replica", "data", "fsdp", "tensor")


def on_host(array: jax.Array) -> np.ndarray:
    """Return the full array on the host, from all devices and processes."""
    if not array.is_fully_addressable:
        assert isinstance(array.sharding, NamedSharding)
        whole = NamedSharding(array.sharding.mesh, PartitionSpec())
        array = jax.jit(lambda one: one, out_shardings=whole)(array)
    return np.asarray(array)


@dataclass(frozen=True, eq=False)
class Spread:
    """Places parameters and calibration batches on a mesh.

    Attributes:
        mesh: The devices. Rows of a batch are sharded along `data` and `fsdp`, weights along `fsdp`
            and `tensor`.
        layout: The layout of the parameters as plain arrays.
    """

    mesh: Mesh
    layout: Layout

    @classmethod
    def of(cls, mesh: Mesh, adapter: ModelAdapter, params: PyTree, example: PyTree) -> "Spread":
        """Return the placement of a model and of batches like `example`.

        Raises:
            MeshError: An axis shards neither rows nor weights.
            TPUValidationError: The devices do not divide the rows of the example.
            ShardingError: The weights cannot be sharded.
        """
        if strange := [name for name in mesh.axis_names if role_of(name) not in _ROLES]:
            raise MeshError(
                f"the mesh has the axis '{strange[0]}', but calibration supports data, fsdp and "
                "tensor; use axes with these names."
            )
        # `jax.make_mesh` has explicit axes, for which a model's own matmuls would have to state
        # shardings. With automatic axes, as on all meshes of tpukit, the compiler decides.
        mesh = Mesh(mesh.devices, mesh.axis_names)
        layout = make_layout(
            params, mesh, strategy_for(mesh.axis_names), head_counts=head_counts_of(adapter)
        )
        made = cls(mesh, layout)
        rows = [leaf.shape[0] for leaf in jax.tree.leaves(example) if leaf.ndim]
        if not any(made._is_shared(count) for count in rows):
            raise TPUValidationError(
                f"batches have {max(rows, default=0)} rows, which {made.ways} devices "
                f"({' × '.join(made.axes)}) do not divide; use a multiple of {made.ways} rows, or "
                "a smaller mesh."
            )
        return made

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that shard the rows of a batch."""
        return axes_with_role(self.mesh.axis_names, *BATCH_ROLES)

    @property
    def ways(self) -> int:
        """Devices that share the rows of a batch."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def params(self, params: PyTree) -> PyTree:
        """Return the parameters sharded on the mesh.

        Quantized parameters are sharded like their matrices, and replicated where a shard boundary
        would split a code.
        """
        if not any(map(is_stored, jax.tree.leaves(params, is_leaf=is_stored))):
            return reshard(params, self.layout)
        places = stored_shardings(params, self.layout.shardings, or_whole=True)
        return jax.device_put(params, places)

    def gram(self, gram: jax.Array) -> jax.Array:
        """Return XᵀX (…, inputs, inputs) with rows sharded over all devices."""
        if gram.shape[-2] % self.mesh.size:
            return gram
        spec = PartitionSpec(*(None,) * (gram.ndim - 2), self.mesh.axis_names)
        return jax.lax.with_sharding_constraint(gram, NamedSharding(self.mesh, spec))

    def batch(self, batch: PyTree) -> PyTree:
        """Return a batch on the mesh; a smaller last batch is replicated."""

        def one(leaf: Any) -> Any:
            shared = leaf.ndim and self._is_shared(leaf.shape[0])
            spec = PartitionSpec(self.axes) if shared else PartitionSpec()
            return jax.device_put(leaf, NamedSharding(self.mesh, spec))

        return jax.tree.map(one, batch)

    def _is_shared(self, rows: int) -> bool:
        return rows % self.ways == 0
