"""`split_call`: an op's implementations, one for each platform, on pieces of split arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from ...hardware.target import current_target
from .primitive import FlatFunction, PartitionedCall, call_p, on_pieces
from .splits import Assignment, Pass, Spec, partition_spec


@dataclass(frozen=True)
class Candidate:
    """One implementation of an op.

    Attributes:
        function: `f(*arrays)`, or `f(*arrays, axes=…)` where the op's kernels are told the axes.
        is_kernel: Whether the compiler cannot partition it.
    """

    function: Callable[..., Any]
    is_kernel: bool


def split_call(
    op: str,
    candidates: Mapping[str, Candidate],
    chosen: Mapping[str, str],
    names: Pass,
    *arrays: Any,
    is_named: bool,
) -> Any:
    """Run the candidate of the platform that the program is lowered for, on each device's pieces.

    Args:
        op: The op's name, for messages.
        candidates: By name.
        chosen: Their names by jax's names of platforms; "default" for those that are not named.
        names: Of the dimensions of arrays and results.
        *arrays: Arrays, or trees of them.
        is_named: Whether the user named the implementation.
    """
    flat, structure = jax.tree.flatten(arrays)
    order = list(candidates)
    # Without shardings: where those are part of a type, a kernel takes pieces and nothing else.
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in flat]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        traced = [_traced(one.function, structure, shapes) for one in candidates.values()]
    # What every candidate returns as it was given, or returns twice, needs no copy of its own.
    known_as = [
        same[0] if len(set(same)) == 1 else None
        for same in zip(*(one.known_as for one in traced), strict=True)
    ]
    kept = [at for at, source in enumerate(known_as) if source is None]
    tree, avals = traced[0].tree, traced[0].closed.out_avals
    call = PartitionedCall(
        op,
        tuple(_flat(one, structure, kept) for one in candidates.values()),
        {platform: order.index(name) for platform, name in chosen.items()},
        frozenset(order.index(name) for name, one in candidates.items() if one.is_kernel),
        is_named,
        names.of(arrays, tree.unflatten(avals)).only(kept),
        current_target(),
    )
    mesh = _typed_mesh(flat)
    if mesh is None:
        jaxprs = tuple(one.only(kept) for one in traced)
        made = iter(call_p.bind(*flat, call=call, jaxprs=jaxprs))
    else:
        made = iter(_on_typed(call, flat, mesh, [avals[at].shape for at in kept]))
    arrays_and_results = list(flat)
    for source in known_as:
        arrays_and_results.append(next(made) if source is None else arrays_and_results[source])
    return tree.unflatten(arrays_and_results[len(flat) :])


@dataclass(frozen=True)
class _Traced:
    """What a function makes of arrays.

    Attributes:
        closed: All of it.
        tree: Of the results.
        known_as: For each result the first of arguments and results that is the same value, by
            its number; None for a new one.
    """

    closed: core.ClosedJaxpr
    tree: Any
    known_as: list[int | None]

    def only(self, results: Sequence[int]) -> core.ClosedJaxpr:
        """What these of the results need."""
        used = [at in results for at in range(len(self.closed.out_avals))]
        jaxpr, _ = partial_eval.dce_jaxpr(self.closed.jaxpr, used, instantiate=True)
        return core.ClosedJaxpr(jaxpr, self.closed.consts)


def _traced(function: Callable[..., Any], structure: Any, shapes: Sequence[Any]) -> _Traced:
    def on_leaves(*leaves: Any) -> Any:
        return function(*structure.unflatten(leaves))

    closed, results = jax.make_jaxpr(on_leaves, return_shape=True)(*shapes)
    values = [*closed.jaxpr.invars, *closed.jaxpr.outvars]
    known_as = [
        next((at for at, one in enumerate(values[:index]) if one is values[index]), None)
        for index in range(len(shapes), len(values))
    ]
    return _Traced(closed, jax.tree.structure(results), known_as)


def _flat(candidate: Candidate, structure: Any, kept: Sequence[int]) -> FlatFunction:
    def run(arrays: Sequence[Any], axes: Assignment | None) -> list[Any]:
        told = {} if axes is None else {"axes": axes}
        leaves = jax.tree.leaves(candidate.function(*structure.unflatten(arrays), **told))
        return [leaves[at] for at in kept]

    return run


def split_as(arrays: Any, kinds: Any) -> Any:
    """The arrays, split as types say: a gradient has the type of its argument."""

    def place(array: Any, kind: Any) -> Any:
        typed = AxisType.Explicit in kind.sharding.mesh.axis_types
        return jax.sharding.reshard(array, kind.sharding) if typed else array

    return arrays if kinds is None else jax.tree.map(place, arrays, kinds)


def _typed_mesh(flat: Sequence[Any]) -> AbstractMesh | None:
    """The mesh over which shardings are part of the arrays' types, if there is one."""
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in flat]
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def _on_typed(
    call: PartitionedCall, flat: Sequence[Any], mesh: AbstractMesh, results: Sequence[Sequence[int]]
) -> list[Any]:
    """What the lowering does otherwise: here the types say how arrays are split."""
    specs = [_typed_spec(leaf) for leaf in flat]
    # Typed dimensions cannot be cut anew, as adding up what was repeated would.
    names = replace(call.names, shared=frozenset())
    axes = names.assign(specs, [leaf.shape for leaf in flat], dict(mesh.shape))
    placed = [
        jax.sharding.reshard(leaf, NamedSharding(mesh, partition_spec(own, axes)))
        for leaf, own in zip(flat, names.inputs, strict=True)
    ]

    def by_platform(arrays: Sequence[Any], axes: Assignment | None) -> list[Any]:
        def bound(number: int) -> Callable[..., Any]:
            return lambda *arrays: call.on_piece(number)(arrays, axes)

        functions = {platform: bound(number) for platform, number in call.chosen.items()}
        return jax.lax.platform_dependent(*arrays, **functions)

    return on_pieces(names, by_platform, axes, mesh, results)(*placed)


def _typed_spec(leaf: Any) -> Spec:
    entries = jax.typeof(leaf).sharding.spec
    split = [() if entry is None else entry for entry in entries]
    return tuple((entry,) if isinstance(entry, str) else tuple(entry) for entry in split)
