"""The mesh over several pods: one axis between them, one within each."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import AxisType, Mesh

from ...annotations import Device
from ...errors import MeshError
from ...parallel.mesh.mesh import create_mesh
from ...runtime.environment import open_devices
from .sums import DCN, ICI


def devices_by_pod(pods: int, devices: Sequence[Device] | None = None) -> list[list[Device]]:
    """Return the devices of each pod, as many for each.

    On TPU the runtime knows which slice a device is in. Elsewhere all devices are said to be of
    one slice, so pods are made of processes, or, in a single process, of its devices.

    Raises:
        MeshError: There are fewer slices, processes or devices than pods, or they do not divide.
    """
    found = list(open_devices() if devices is None else devices)
    slices = sorted({slice_of(device) for device in found})
    processes = sorted({device.process_index for device in found})
    if len(slices) > 1:
        groups = [[d for d in found if slice_of(d) == index] for index in slices]
        what = "slices"
    elif len(processes) > 1:
        groups = [[d for d in found if d.process_index == index] for index in processes]
        what = "processes"
    else:
        groups = [[device] for device in found[: len(found) // pods * pods]]
        what = "devices"
    if not groups or len(groups) % pods:
        raise MeshError(
            f"{pods} pods cannot be made of {len(groups) or len(found)} {what}; give a number of "
            "pods that divides it, or start the job with more."
        )
    share = len(groups) // pods
    joined = [
        [device for group in groups[at : at + share] for device in group]
        for at in range(0, len(groups), share)
    ]
    if len({len(pod) for pod in joined}) > 1:
        sizes = ", ".join(str(len(pod)) for pod in joined)
        raise MeshError(
            f"The pods have {sizes} devices; a synchronous sum needs as many in each of them."
        )
    return joined


def mesh_over(groups: Sequence[Sequence[Device]]) -> Mesh:
    """Return the mesh ("dcn", "ici") over the devices of pods."""
    every = [device for group in groups for device in group]
    if len({slice_of(device) for device in every}) == len(groups) > 1:
        return create_mesh(
            mesh_shape=(1, len(groups[0])),
            axis_names=(DCN, ICI),
            devices=every,
            dcn_mesh_shape=(len(groups), 1),
        )
    grid = np.array([list(group) for group in groups], dtype=object)
    return Mesh(grid, (DCN, ICI), axis_types=(AxisType.Auto,) * 2)


def slice_of(device: Device) -> int:
    """Return the number of a device's slice; 0 where the platform knows none."""
    return int(getattr(device, "slice_index", 0) or 0)
