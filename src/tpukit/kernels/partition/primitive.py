"""The call of an op as a primitive whose lowering runs a kernel on each device's pieces.

The compiler cannot partition a kernel, and jax's `custom_partitioning` cannot help: libtpu does not
call it ("Custom emitter for CustomSPMDPartitioning not found", jax issue 38196), and a program that
holds it can neither be exported nor be lowered for an abstract mesh. So the call is a primitive,
and its lowering, which knows the platform and, by `propagation`, how the arguments are split,
writes the `shard_map` that a user would have to write.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
from jax.extend import core
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType

from ...errors import TPUKernelError
from ...hardware.target import target_chip
from .propagation import known_shardings
from .splits import (
    Assignment,
    CallNames,
    add_up,
    add_up_shared,
    partition_spec,
    repeat_shared,
    summed_axes,
    ways_of,
)

# Takes arrays, and returns them, flat; told the axes that split them, or None.
FlatFunction: TypeAlias = Callable[[Sequence[Any], Assignment | None], list[Any]]
Jaxprs: TypeAlias = tuple[core.ClosedJaxpr, ...]


@dataclass(frozen=True, eq=False, repr=False)
class PartitionedCall:
    """All of a call but its arrays, and what its candidates make of whole ones.

    Attributes:
        op: The op's name.
        candidates: What may run, and does so on pieces.
        chosen: Their numbers by jax's names of platforms; "default" for those that are not named.
        kernels: The numbers of those that the compiler cannot partition.
        is_named: Whether the user named the implementation, so that no other may take its place.
        names: Of the dimensions of arrays and results.
        target: The generation traced for.
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
        """The candidates that run on these platforms."""
        default = self.chosen["default"]
        return {self.chosen.get(platform, default) for platform in platforms}

    def on_piece(self, number: int) -> FlatFunction:
        """A candidate for the generation that was stated when the op was called.

        A program may be lowered after the block that stated it.
        """

        def traced(arrays: Sequence[Any], axes: Assignment | None) -> list[Any]:
            with nullcontext() if self.target is None else target_chip(self.target):
                return self.candidates[number](arrays, axes)

        return traced


def on_pieces(
    names: CallNames,
    run: FlatFunction,
    axes: Assignment,
    mesh: AbstractMesh,
    results: Sequence[Sequence[int]],
) -> Callable[..., Any]:
    """`run` on each device's pieces of arrays that are split over the axes assigned to names.

    Args:
        names: Of the dimensions.
        run: Takes pieces.
        axes: Assigned to names.
        mesh: Theirs.
        results: The shapes of all results.
    """
    ways = {name: ways_of(own, mesh.shape) for name, own in axes.items()}

    def local(*pieces: Any) -> list[Any]:
        if names.told_axes:
            return run(pieces, axes)
        parts = zip(names.outputs, run(pieces, None), strict=True)
        return [add_up(part, summed_axes(own, axes)) for own, part in parts]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(partition_spec(own, axes) for own in names.inputs),
        out_specs=[partition_spec(own, axes) for own in names.outputs],
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )

    def call(*arrays: Any) -> list[Any]:
        pairs = zip(arrays, names.inputs, strict=True)
        found = mapped(*(repeat_shared(array, own, ways) for array, own in pairs))
        return [add_up_shared(x, shape) for x, shape in zip(found, results, strict=True)]

    return call


call_p = core.Primitive("split_call")
call_p.multiple_results = True


@call_p.def_effectful_abstract_eval
def _abstract(*_: Any, call: PartitionedCall, jaxprs: Jaxprs) -> tuple[list[Any], frozenset[Any]]:
    effects = frozenset(effect for one in jaxprs for effect in one.effects)
    return jaxprs[call.chosen["default"]].out_avals, effects


@call_p.def_impl
def _run_at_once(*arrays: Any, call: PartitionedCall, jaxprs: Jaxprs) -> list[Any]:
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
        return lambda arrays, axes: jax.vmap(lambda *one: run(one, axes), in_axes)(*arrays)

    batched = replace(
        call,
        candidates=tuple(over_batch(run) for run in call.candidates),
        names=call.names.batched(is_batched),
    )
    whole = tuple(
        jax.make_jaxpr(jax.vmap(core.jaxpr_as_fun(one), in_axes))(*moved) for one in jaxprs
    )
    out = call_p.bind(*moved, call=batched, jaxprs=whole)
    return out, [0] * len(out)


batching.primitive_batchers[call_p] = _batch


def _lower(ctx: Any, *values: Any, call: PartitionedCall, jaxprs: Jaxprs) -> Any:
    function = _to_lower(ctx, values, call, jaxprs)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *values)


# Lowered once for all calls alike, a call would be a function of its own, which knows nothing of
# where its arguments come from.
mlir.register_lowering(call_p, _lower, cacheable=False)


def _to_lower(
    ctx: Any, values: Sequence[Any], call: PartitionedCall, jaxprs: Jaxprs
) -> Callable[..., Any]:
    default = core.jaxpr_as_fun(jaxprs[call.chosen["default"]])
    numbers = call.numbers(ctx.platforms or ctx.module_context.platforms)
    if len(numbers) > 1:
        return default  # jax lowers a kernel for all platforms of a program, or not at all
    (number,) = numbers
    if number not in call.kernels or not _is_spread(ctx.module_context.axis_context):
        return core.jaxpr_as_fun(jaxprs[number])
    known = known_shardings(ctx.module_context.module, values)
    if known.says_nothing or not known.mesh:
        if call.is_named:
            raise _unknown(call.op)
        return default  # the compiler will know how arrays are split, and can partition this
    specs = [
        spec if spec is not None else ((),) * len(aval.shape)
        for spec, aval in zip(known.specs, ctx.avals_in, strict=True)
    ]
    axes = call.names.assign(specs, [aval.shape for aval in ctx.avals_in], known.mesh)
    # Inside a `shard_map` over some axes the others are left, and jax wants the mesh that says so.
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        kinds = (AxisType.Auto,) * len(known.mesh)
        mesh = AbstractMesh(tuple(known.mesh.values()), tuple(known.mesh), axis_types=kinds)
    results = [aval.shape for aval in ctx.avals_out]
    return on_pieces(call.names, call.on_piece(number), axes, mesh, results)


def _is_spread(around: Any) -> bool:
    """Whether the compiler would have to partition what is lowered here."""
    if isinstance(around, mlir.ShardingContext):
        return around.num_devices > 1
    if isinstance(around, mlir.SPMDAxisContext):
        return set(around.manual_axes) != set(around.mesh.axis_names)
    return False


def _unknown(op: str) -> TPUKernelError:
    return TPUKernelError(
        f"{op} was asked for as a kernel in a program of several devices, and how its arguments "
        "are split is not known: inside a function that is jitted, scanned or mapped only its own "
        "constraints are. Apply jax.lax.with_sharding_constraint to them there, or leave "
        "implementation= out to take what the compiler can partition."
    )
