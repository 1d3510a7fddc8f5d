"""Which devices a pod has here, and how arrays are divided among them."""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ...annotations import AnyMesh, Device
from ...errors import PodUnavailable
from ...hardware import Slice
from ...runtime.environment import open_devices
from ..causes import Cause

logger = logging.getLogger(__name__)
DATA = "data"
# Smaller arrays stay whole on every device: dividing them saves nothing.
SMALLEST_DIVIDED = 2**12
LOCAL = "local"


def devices_here(on: Slice, provider: str, devices: Sequence[Device] | None = None) -> list[Device]:
    """Return the devices of this job that a pod's slice stands for.

    A pod of provider "local" is this machine: with fewer devices than the slice has, all of them.

    Raises:
        PodUnavailable: This process does not run on the pod.
    """
    found = list(open_devices() if devices is None else devices)
    if len(found) >= on.devices:
        return found[: on.devices]
    if provider == LOCAL:
        facts = {"slice": str(on), "devices": len(found), "wanted": on.devices}
        logger.info("fewer devices here than the slice has", extra=facts)
        return found
    raise PodUnavailable(
        f"{on} has {on.devices} devices and this process sees {len(found)}: it does not run on the "
        f"pod. Start it there (tpukit launch … --on {on}), or rehearse with provider='local'.",
        cause=Cause.UNREACHABLE.value,
    )


def mesh_of(devices: Sequence[Device]) -> Mesh:
    """Return the mesh over some devices: one axis."""
    grid = np.array(list(devices), dtype=object)
    return Mesh(grid, (DATA,), axis_types=(AxisType.Auto,))


def mesh_without_devices(on: Slice) -> AbstractMesh:
    """Return the mesh over a slice that is not here."""
    return AbstractMesh((on.devices,), (DATA,), axis_types=(AxisType.Auto,))


def divided(shape: Sequence[int], mesh: AnyMesh) -> NamedSharding:
    """Return how a parameter is divided: by its largest dimension that all devices share alike."""
    ways = mesh.shape[DATA]
    entries: list[str | None] = [None] * len(shape)
    able = [at for at, size in enumerate(shape) if size % ways == 0]
    if able and int(np.prod(shape)) >= SMALLEST_DIVIDED:
        entries[max(able, key=lambda at: shape[at])] = DATA
    return NamedSharding(mesh, PartitionSpec(*entries))


def by_example(shape: Sequence[int], mesh: AnyMesh) -> NamedSharding:
    """Return how a batch is divided: by its first dimension, where that is possible."""
    even = len(shape) > 0 and shape[0] % mesh.shape[DATA] == 0
    return NamedSharding(mesh, PartitionSpec(DATA) if even else PartitionSpec())


def shape_on(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Return the shape of an array with where it lies."""
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=sharding)
