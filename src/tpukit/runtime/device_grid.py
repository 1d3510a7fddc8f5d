"""Order devices for a mesh, so that neighbours in the mesh are neighbours on the network."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import MeshError


def arrange_devices(
    shape: Sequence[int],
    devices: Sequence[Any],
    *,
    dcn_shape: Sequence[int] | None = None,
) -> np.ndarray:
    """Return `devices` as an array for `jax.sharding.Mesh`.

    TPU devices, attached or from an offline topology, are placed along the torus by their
    coordinates. The last axis gets the shortest paths, so it should be the axis with the most
    communication. CPU and GPU devices keep their order.

    Args:
        shape: Size of every axis inside one slice (over ICI).
        devices: As many devices as the mesh has places.
        dcn_shape: Size of every axis across slices (over DCN), as long as `shape`. A device's
            slice is its `slice_index` on TPU and its `process_index` elsewhere.

    Returns:
        An object array whose shape is `shape`, times `dcn_shape` axis by axis where given.

    Raises:
        MeshError: The devices do not fill the mesh, or are not a whole block of the torus.
    """
    shape = tuple(int(size) for size in shape)
    if dcn_shape is None or math.prod(dcn_shape) == 1:
        _check_count(shape, devices, "the mesh")
        return _arrange_one_slice(shape, devices)
    dcn_shape = tuple(int(size) for size in dcn_shape)
    if len(dcn_shape) != len(shape):
        raise MeshError(
            f"The DCN shape {dcn_shape} has {len(dcn_shape)} axes but the ICI shape {shape} has "
            f"{len(shape)}; give one DCN size for every axis, 1 where it stays inside a slice."
        )
    slices = _group_by_slice(devices)
    if len(slices) != math.prod(dcn_shape):
        raise MeshError(
            f"The DCN shape {dcn_shape} needs {math.prod(dcn_shape)} slices and the devices belong "
            f"to {len(slices)}; slices are counted by slice_index on TPU and by process elsewhere."
        )
    grid = np.empty((*dcn_shape, *shape), dtype=object)
    for place, members in zip(np.ndindex(*dcn_shape), slices, strict=True):
        _check_count(shape, members, "each slice")
        grid[place] = _arrange_one_slice(shape, members)
    # (dcn0, dcn1, ici0, ici1) -> (dcn0, ici0, dcn1, ici1): the slow network is the outer half
    # of every axis, which is the order hierarchical collectives expect.
    rank = len(shape)
    interleaved = grid.transpose([half * rank + axis for axis in range(rank) for half in (0, 1)])
    return interleaved.reshape(
        [outer * inner for outer, inner in zip(dcn_shape, shape, strict=True)]
    )


def _group_by_slice(devices: Sequence[Any]) -> list[list[Any]]:
    """Return the devices of each slice, in order of slice number."""
    # CPU devices of every process report slice_index 0, so off TPU a process is a slice.
    attribute = "slice_index" if devices and devices[0].platform == "tpu" else "process_index"
    slices: defaultdict[int, list[Any]] = defaultdict(list)
    for device in devices:
        # A topology of one slice leaves the attribute out.
        slices[getattr(device, attribute, 0)].append(device)
    return [slices[number] for number in sorted(slices)]


def _check_count(shape: tuple[int, ...], devices: Sequence[Any], what: str) -> None:
    if math.prod(shape) != len(devices):
        raise MeshError(
            f"The shape {shape} of {what} needs {math.prod(shape)} devices but got {len(devices)}; "
            "change the shape, or pass exactly the devices it covers."
        )


def _arrange_one_slice(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    from jax.experimental import mesh_utils

    if not devices or devices[0].platform != "tpu":
        return np.array(devices, dtype=object).reshape(shape)
    try:
        # Physical axes are split only when no assignment of whole axes exists.
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError) as refused:
        raise MeshError(
            f"These {len(devices)} TPU devices cannot be laid out as {shape}: they are not one "
            "whole block of the torus; pass all devices of a slice, or a rectangular part of it."
        ) from refused
