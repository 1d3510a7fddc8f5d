"""`split_call`: a primitive whose lowering runs a kernel on each device's shards.

The compiler cannot partition a kernel, and jax's `custom_partitioning` does not help. libtpu does
not call it ("Custom emitter for CustomSPMDPartitioning not found", jax issue 38196), and a program
with it can neither be exported nor lowered for an abstract mesh. So the call is a primitive. Its
lowering knows the platform and, by `propagation`, the shardings of the arguments, and writes the
`shard_map` that a user would have to write.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
from jax.extend import core
from jax.interpreters import batching, mlir, partial_eval
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from ...annotations import PyTree
from ...errors import TPUKernelError
from ...hardware.target import current_target, target_chip
from .propagation import known_shardings
from .sharded_call import sharded_call
from .splits import (
    Assignment,
    CallNames,
    Pass,
    Spec,
    add_up,
    add_up_shared,
    partition_spec,
    repeat_shared,
    summed_axes,
    ways_of,
)

# Takes and returns flat arrays; the second argument is the mesh axes by name, or None.
FlatFunction: TypeAlias = Callable[[Sequence[Any], Assignment | None], list[Any]]
Jaxprs: TypeAlias = tuple[core.ClosedJaxpr, ...]


@dataclass(frozen=True, eq=False, repr=False)
class PartitionedCall:
    """A call without its arrays.

    Attributes:
        op: The op's name.
        candidates: The implementations, as functions of flat shards.
        chosen: Candidate numbers by jax's platform names; "default" for all other platforms.
        kernels: The numbers of the candidates that the compiler cannot partition.
        is_named: Whether the user named the implementation, so that no other may replace it.
        names: Names of the dimensions of arrays and results.
        target: The TPU generation that the program is traced for.
    """

    op: str
    candidates: tuple[FlatFunction, ...]
    chosen: Mapping[str, int]
    kernels: frozenset[int]
    is_named: bool
    names: CallNames
    target: str | None

    def __repr__(self) -> str:
        return f"Call({self.op})"

    def numbers(self, platforms: Sequence[str]) -> set[int]:
        """Return the numbers of the candidates for these platforms."""
        default = self.chosen["default"]
        return {self.chosen.get(platform, default) for platform in platforms}

    def on_shard(self, number: int) -> FlatFunction:
        """Return a candidate that is traced for the call's own TPU generation.

        A program may be lowered after the `target_chip` block that it was traced in.
        """

        def traced(arrays: Sequence[Any], axes: Assignment | None) -> list[Any]:
            with nullcontext() if self.target is None else target_chip(self.target):
                return self.candidates[number](arrays, axes)

        return traced


def on_shards(
    names: CallNames,
    run: FlatFunction,
    axes: Assignment,
    mesh: AbstractMesh,
    results: Sequence[Sequence[int]],
) -> Callable[..., Any]:
    """Return a function that runs `run` on each device's shards.

    Args:
        names: Names of the dimensions.
        run: A function of flat shards.
        axes: The mesh axes for each name.
        mesh: The mesh of those axes.
        results: The shapes of the unsharded results.
    """
    ways = {name: ways_of(own, mesh.shape) for name, own in axes.items()}

    def local(*pieces: Any) -> list[Any]:
        if names.takes_axes:
            return run(pieces, axes)
        parts = zip(names.outputs, run(pieces, None), strict=True)
        return [add_up(part, summed_axes(own, axes)) for own, part in parts]

    mapped = sharded_call(
        local,
        mesh,
        in_specs=tuple(partition_spec(own, axes) for own in names.inputs),
        out_specs=[partition_spec(own, axes) for own in names.outputs],
    )

    def call(*arrays: PyTree) -> list[Any]:
        pairs = zip(arrays, names.inputs, strict=True)
        outputs = mapped(*(repeat_shared(array, own, ways) for array, own in pairs))
        return [add_up_shared(x, shape) for x, shape in zip(outputs, results, strict=True)]

    return call


call_p = core.Primitive("split_call")
call_p.multiple_results = True


@call_p.def_effectful_abstract_eval
def _abstract(*_: Any, call: PartitionedCall, jaxprs: Jaxprs) -> tuple[list[Any], frozenset[Any]]:
    effects = frozenset(effect for jaxpr in jaxprs for effect in jaxpr.effects)
    return jaxprs[call.chosen["default"]].out_avals, effects


@call_p.def_impl
def _run_at_once(*arrays: PyTree, call: PartitionedCall, jaxprs: Jaxprs) -> list[Any]:
    devices = {device for array in arrays for device in getattr(array, "devices", set)()}
    if len(devices) > 1:
        return jax.jit(lambda *arrays: call_p.bind(*arrays, call=call, jaxprs=jaxprs))(*arrays)
    platform = next(iter(devices)).platform if devices else jax.default_backend()
    (number,) = call.numbers(["cuda" if platform == "gpu" else platform])
    return core.jaxpr_as_fun(jaxprs[number])(*arrays)


def _batch(
    arrays: Sequence[Any], dimensions: Sequence[Any], *, call: PartitionedCall, jaxprs: Jaxprs
) -> tuple[list[Any], list[int]]:
    is_batched = [dimension is not None for dimension in dimensions]
    moved = [
        jax.numpy.moveaxis(array, dimension, 0) if batched else array
        for array, dimension, batched in zip(arrays, dimensions, is_batched, strict=True)
    ]
    in_axes = [0 if batched else None for batched in is_batched]

    def over_batch(run: FlatFunction) -> FlatFunction:
        return lambda arrays, axes: jax.vmap(lambda *example: run(example, axes), in_axes)(*arrays)

    batched = replace(
        call,
        candidates=tuple(over_batch(run) for run in call.candidates),
        names=call.names.batched(is_batched),
    )
    batched_jaxprs = tuple(
        jax.make_jaxpr(jax.vmap(core.jaxpr_as_fun(jaxpr), in_axes))(*moved) for jaxpr in jaxprs
    )
    out = call_p.bind(*moved, call=batched, jaxprs=batched_jaxprs)
    return out, [0] * len(out)


batching.primitive_batchers[call_p] = _batch


def _lower(ctx: Any, *values: Any, call: PartitionedCall, jaxprs: Jaxprs) -> Any:
    function = _to_lower(ctx, values, call, jaxprs)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *values)


# A cached lowering would be a separate function without knowledge of its arguments' shardings.
mlir.register_lowering(call_p, _lower, cacheable=False)


def _to_lower(
    ctx: Any, values: Sequence[Any], call: PartitionedCall, jaxprs: Jaxprs
) -> Callable[..., Any]:
    default = core.jaxpr_as_fun(jaxprs[call.chosen["default"]])
    numbers = call.numbers(ctx.platforms or ctx.module_context.platforms)
    if len(numbers) > 1:
        return default  # jax lowers a kernel for all platforms of a program, or for none
    (number,) = numbers
    if number not in call.kernels or not _is_spread(ctx.module_context.axis_context):
        return core.jaxpr_as_fun(jaxprs[number])
    known = known_shardings(ctx.module_context.module, values)
    if known.is_unknown or not known.mesh:
        if call.is_named:
            raise _unknown(call.op)
        return default  # the compiler knows the shardings later and can partition this
    specs = [
        spec if spec is not None else ((),) * len(aval.shape)
        for spec, aval in zip(known.specs, ctx.avals_in, strict=True)
    ]
    axes = call.names.assign(specs, [aval.shape for aval in ctx.avals_in], known.mesh)
    # Inside a `shard_map` over some axes, jax requires its mesh with the remaining axes.
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        kinds = (AxisType.Auto,) * len(known.mesh)
        mesh = AbstractMesh(tuple(known.mesh.values()), tuple(known.mesh), axis_types=kinds)
    results = [aval.shape for aval in ctx.avals_out]
    return on_shards(call.names, call.on_shard(number), axes, mesh, results)


def _is_spread(around: Any) -> bool:
    """Whether the compiler would have to partition the program that is lowered here."""
    if isinstance(around, mlir.ShardingContext):
        return around.num_devices > 1
    if isinstance(around, mlir.SPMDAxisContext):
        return set(around.manual_axes) != set(around.mesh.axis_names)
    return False


def _unknown(op: str) -> TPUKernelError:
    return TPUKernelError(
        f"{op} was called with a named kernel in a program for several devices, but the shardings "
        "of its arguments are not known: inside a jitted, scanned or mapped function only "
        "constraints made there are. Apply jax.lax.with_sharding_constraint to the arguments "
        "there, or leave implementation= out to choose one that the compiler can partition."
    )


@dataclass(frozen=True)
class Candidate:
    """One implementation of an op.

    Attributes:
        function: `f(*arrays)`, or `f(*arrays, axes=…)` if the op's kernels take the mesh axes.
        is_kernel: Whether the compiler cannot partition it.
    """

    function: Callable[..., Any]
    is_kernel: bool


def split_call(
    op: str,
    candidates: Mapping[str, Candidate],
    chosen: Mapping[str, str],
    names: Pass,
    *arrays: PyTree,
    is_named: bool,
) -> Any:
    """Run the candidate for the lowering's platform on each device's shards.

    Args:
        op: The op's name, for messages.
        candidates: Implementations by name.
        chosen: Candidate names by jax's platform names; "default" for all other platforms.
        names: Names of the dimensions of arrays and results.
        *arrays: Arrays, or trees of them.
        is_named: Whether the user named the implementation.
    """
    flat, structure = jax.tree.flatten(arrays)
    order = list(candidates)
    # Without shardings, because a kernel takes shards where shardings are part of the type.
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in flat]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        traced = [
            _traced(candidate.function, structure, shapes) for candidate in candidates.values()
        ]
    # A result that every candidate returns unchanged or twice needs no copy.
    known_as = [
        same[0] if len(set(same)) == 1 else None
        for same in zip(*(trace.known_as for trace in traced), strict=True)
    ]
    kept = [at for at, source in enumerate(known_as) if source is None]
    tree, avals = traced[0].tree, traced[0].closed.out_avals
    call = PartitionedCall(
        op,
        tuple(_flat(candidate, structure, kept) for candidate in candidates.values()),
        {platform: order.index(name) for platform, name in chosen.items()},
        frozenset(
            order.index(name) for name, candidate in candidates.items() if candidate.is_kernel
        ),
        is_named,
        names.of(arrays, tree.unflatten(avals)).only(kept),
        current_target(),
    )
    mesh = _typed_mesh(flat)
    if mesh is None:
        jaxprs = tuple(trace.only(kept) for trace in traced)
        made = iter(call_p.bind(*flat, call=call, jaxprs=jaxprs))
    else:
        made = iter(_on_typed(call, flat, mesh, [avals[at].shape for at in kept]))
    arrays_and_results = list(flat)
    for source in known_as:
        arrays_and_results.append(next(made) if source is None else arrays_and_results[source])
    return tree.unflatten(arrays_and_results[len(flat) :])


@dataclass(frozen=True)
class _Traced:
    """A traced function.

    Attributes:
        closed: The jaxpr.
        tree: The structure of the results.
        known_as: For each result the number of an equal earlier argument or result; None for a new
            value.
    """

    closed: core.ClosedJaxpr
    tree: PyTree
    known_as: list[int | None]

    def only(self, results: Sequence[int]) -> core.ClosedJaxpr:
        """Return the jaxpr that computes only these results."""
        used = [at in results for at in range(len(self.closed.out_avals))]
        jaxpr, _ = partial_eval.dce_jaxpr(self.closed.jaxpr, used, instantiate=True)
        return core.ClosedJaxpr(jaxpr, self.closed.consts)


def _traced(function: Callable[..., Any], structure: Any, shapes: Sequence[Any]) -> _Traced:
    def on_leaves(*leaves: Any) -> Any:
        return function(*structure.unflatten(leaves))

    closed, results = jax.make_jaxpr(on_leaves, return_shape=True)(*shapes)
    values = [*closed.jaxpr.invars, *closed.jaxpr.outvars]
    known_as = [
        next((at for at, value in enumerate(values[:index]) if value is values[index]), None)
        for index in range(len(shapes), len(values))
    ]
    return _Traced(closed, jax.tree.structure(results), known_as)


def _flat(candidate: Candidate, structure: Any, kept: Sequence[int]) -> FlatFunction:
    def run(arrays: Sequence[Any], axes: Assignment | None) -> list[Any]:
        keywords = {} if axes is None else {"axes": axes}
        leaves = jax.tree.leaves(candidate.function(*structure.unflatten(arrays), **keywords))
        return [leaves[at] for at in kept]

    return run


def split_as(arrays: Any, kinds: Any) -> Any:
    """Reshard arrays as their types say, because a gradient has the type of its argument."""

    def place(array: Any, kind: Any) -> Any:
        typed = AxisType.Explicit in kind.sharding.mesh.axis_types
        return jax.sharding.reshard(array, kind.sharding) if typed else array

    return arrays if kinds is None else jax.tree.map(place, arrays, kinds)


def _typed_mesh(flat: Sequence[Any]) -> AbstractMesh | None:
    """Return the mesh of arrays with typed shardings, if there is one."""
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in flat]
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def _on_typed(
    call: PartitionedCall, flat: Sequence[Any], mesh: AbstractMesh, results: Sequence[Sequence[int]]
) -> list[Any]:
    """Run a call on arrays whose types state their shardings."""
    specs = [_typed_spec(leaf) for leaf in flat]
    # Typed dimensions cannot be reshaped, which summing repeated elements would need.
    names = replace(call.names, shared=frozenset())
    axes = names.assign(specs, [leaf.shape for leaf in flat], dict(mesh.shape))
    placed = [
        jax.sharding.reshard(leaf, NamedSharding(mesh, partition_spec(own, axes)))
        for leaf, own in zip(flat, names.inputs, strict=True)
    ]

    def by_platform(arrays: Sequence[Any], axes: Assignment | None) -> list[Any]:
        def bound(number: int) -> Callable[..., Any]:
            return lambda *arrays: call.on_shard(number)(arrays, axes)

        functions = {platform: bound(number) for platform, number in call.chosen.items()}
        return jax.lax.platform_dependent(*arrays, **functions)

    return on_shards(names, by_platform, axes, mesh, results)(*placed)


def _typed_spec(leaf: Any) -> Spec:
    entries = jax.typeof(leaf).sharding.spec
    split = [() if entry is None else entry for entry in entries]
    return tuple((entry,) if isinstance(entry, str) else tuple(entry) for entry in split)
