"""The mesh over several pods: one axis between pods and one within each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jax.sharding import AxisType, Mesh

from ...annotations import Device
from ...errors import MeshError
from ...parallel.mesh.mesh import create_mesh
from ...runtime.environment import open_devices
from ..config import PodConfig
from ..pod import Pod
from .sums import DCN, ICI

Watch = Callable[[], Mapping[str, str]]
"""Returns the names of lost pods with reasons."""


@dataclass(frozen=True)
class MeshMember:
    """A pod that takes part.

    Attributes:
        name: The pod's name; its number and zone if no pod was allocated.
        pod: The allocated pod; None if the job's own devices are divided.
    """

    name: str
    config: PodConfig
    pod: Pod | None = None

    @property
    def zone(self) -> str:
        """The pod's zone, if known."""
        if self.pod is not None:
            return self.pod.zone
        return self.config.zones[0] if self.config.zones else ""


class PodKeeper(Protocol):
    """Allocates pods and reports their states, such as `TpuManager`."""

    def allocate_pod(self, config: PodConfig) -> Pod:
        """Allocate a pod, and return it when it is ready."""
        ...

    def release(self, pod: Pod) -> None:
        """Release a pod."""
        ...

    def list(self) -> Sequence[Pod]:
        """Return the present state of all pods."""
        ...


def watch_pods(keeper: PodKeeper, members: Sequence[MeshMember]) -> Watch:
    """Return a function that reports which of these pods are lost."""
    wanted = {member.name for member in members if member.pod is not None}

    def look() -> Mapping[str, str]:
        now = {pod.name: pod for pod in keeper.list() if pod.name in wanted}
        lost = {
            name: pod.reason or pod.state.value for name, pod in now.items() if pod.state.is_lost
        }
        gone = dict.fromkeys(wanted - now.keys(), "it no longer exists")
        return {**lost, **gone}

    return look


def devices_by_pod(pods: int, devices: Sequence[Device] | None = None) -> list[list[Device]]:
    """Return the devices of each pod, the same number for each.

    On TPU the runtime reports the slice of each device. Other platforms report one slice for all,
    so a pod is a group of processes there, or of devices in a single process.

    Raises:
        MeshError: There are fewer slices, processes or devices than pods, or they do not divide
            evenly.
    """
    seen = list(open_devices() if devices is None else devices)
    slices = sorted({slice_of(device) for device in seen})
    processes = sorted({device.process_index for device in seen})
    if len(slices) > 1:
        groups = [[d for d in seen if slice_of(d) == index] for index in slices]
        what = "slices"
    elif len(processes) > 1:
        groups = [[d for d in seen if d.process_index == index] for index in processes]
        what = "processes"
    else:
        groups = [[device] for device in seen[: len(seen) // pods * pods]]
        what = "devices"
    if not groups or len(groups) % pods:
        raise MeshError(
            f"{pods} pods cannot be made of {len(groups) or len(seen)} {what}; give a number of "
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
            f"The pods have {sizes} devices; a synchronous sum needs the same number in each."
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
    """Return the index of a device's slice; 0 if the platform does not report it."""
    return int(getattr(device, "slice_index", 0) or 0)
