"""Which devices a run uses and in which shape, from what the user or a plan says."""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from ...annotations import Device
from ...errors import MeshError
from .mesh import MeshConfig, create_mesh


def mesh_here(
    sizes: Mapping[str, int],
    devices: Sequence[Device],
    *,
    dcn_mesh_shape: Sequence[int] | None = None,
) -> Mesh:
    """The mesh of these sizes on these devices; `dcn_mesh_shape` is the part across slices.

    Raises:
        MeshError: The sizes do not cover exactly these devices.
    """
    names = tuple(sizes)
    across = (1,) * len(sizes) if dcn_mesh_shape is None else tuple(dcn_mesh_shape)
    if len(across) != len(sizes):
        raise MeshError(
            f"dcn_mesh_shape={across} has {len(across)} sizes and the mesh has the axes "
            f"{', '.join(names)}; give each axis its factor across slices."
        )
    whole = MeshConfig(tuple(sizes.values()), names).resolve(len(devices))
    if uneven := [
        name for name, size, outer in zip(names, whole, across, strict=True) if size % outer
    ]:
        raise MeshError(
            f"axis '{uneven[0]}' of {whole} cannot be cut as dcn_mesh_shape={across} says; use "
            "factors that divide the sizes."
        )
    return create_mesh(
        mesh_shape=tuple(size // outer for size, outer in zip(whole, across, strict=True)),
        axis_names=names,
        devices=list(devices),
        dcn_mesh_shape=across if max(across) > 1 else None,
    )


def fit_mesh(
    sizes: Mapping[str, int], device_count: int, *, planned_for: str | None
) -> tuple[dict[str, int], str | None]:
    """A plan's mesh on the devices here, and what was changed, in words.

    A plan for a slice that is not here is run on what is: all axes keep their names, the first
    takes every device and the others have size 1.
    """
    known = math.prod(size for size in sizes.values() if size != -1)
    covers = device_count % known == 0 if -1 in sizes.values() else known == device_count
    if covers:
        return dict(sizes), None
    fitted = {name: device_count if index == 0 else 1 for index, name in enumerate(sizes)}
    planned = " x ".join(f"{name}={size}" for name, size in sizes.items())
    where = f" for {planned_for}" if planned_for else ""
    here = " x ".join(f"{name}={size}" for name, size in fitted.items())
    return fitted, f"the plan's mesh {planned}{where} does not fit {device_count} devices: {here}"
