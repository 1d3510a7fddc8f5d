"""`sharded_call`: the one place where a function of shards is mapped over a mesh."""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import AxisType

from ...annotations import AnyMesh


def manual_axes(mesh: AnyMesh) -> frozenset[str]:
    """Return the axes that an enclosing region has made manual."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Manual)


def sharded_call(
    function: Callable[..., Any],
    mesh: AnyMesh,
    *,
    in_specs: Any,
    out_specs: Any,
    axes: Collection[str] | None = None,
    checks_varying: bool = False,
) -> Callable[..., Any]:
    """Return `function` of each device's shards, as kernels and collectives need it.

    Inside another manual region, such as a pipeline stage, jax requires the mesh of that region,
    whose axes are manual already.

    Args:
        function: A function of shards.
        mesh: The mesh of the arrays.
        in_specs: Shardings of the arguments.
        out_specs: Shardings of the results.
        axes: The axes to make manual; all by default. A kernel needs all, because the compiler
            cannot partition it over automatic axes.
        checks_varying: Whether jax checks which values differ between devices. It then sums
            gradients of equal values itself, but it has no rule for kernels, nor for a scan that
            begins with a constant.
    """
    current = jax.sharding.get_abstract_mesh()
    taken = manual_axes(current)
    return jax.shard_map(
        function,
        mesh=current if taken else mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(mesh.axis_names if axes is None else axes) - taken,
        check_vma=checks_varying,
    )
