"""Sizes of mesh axes by name: parse, write, fill in, and adapt to another number of devices.

Every other module asks this one how a job's axes fit on some number of devices, so a check for
other devices sees the mesh that training would use there.
"""

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from ..errors import ConfigError, MeshError
from .slice import Slice

_FREE = ("fsdp", "data")
"""Axes that shard nothing the model fixes, so they adapt to the number of devices."""


def default_mesh(target: Slice) -> dict[str, int]:
    """Return the mesh of a job that names none: fsdp within a slice, data across slices.

    Gathering weights over the network between slices in every step only pays for models that
    fill a slice, and the number of slices often divides no dimension of a model.
    """
    return {"fsdp": -1} if target.num_slices == 1 else {"data": target.num_slices, "fsdp": -1}


def parse_mesh(text: str) -> dict[str, int]:
    """Read "fsdp=8,tensor=4".

    Raises:
        MeshError: A part is not `axis=size`, or an axis appears twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not name or not re.fullmatch(r"-1|[0-9]{1,9}", size):
            raise MeshError(f"mesh '{text}': '{part}' is not a size; write fsdp=8,tensor=4.")
        if name in sizes:
            raise MeshError(f"mesh '{text}' names '{name}' twice; give each axis one size.")
        sizes[name] = int(size)
    return sizes


def read_mesh(value: object) -> Mapping[str, int]:
    """Return sizes by axis from a text or a mapping.

    Raises:
        MeshError: The text is not a mesh.
        ConfigError: The value is neither a text nor a mapping of whole numbers.
    """
    if isinstance(value, str):
        return parse_mesh(value)
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"mesh is {value!r}; write sizes by axis, e.g. {{fsdp: 8}}.")
    sizes: Mapping[Any, Any] = value
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise ConfigError(f"mesh axis {name} is {size!r}; write a whole number, or -1.")
    return {str(name): size for name, size in sizes.items()}


def write_mesh(sizes: Mapping[str, int]) -> str:
    """Write sizes as `parse_mesh` reads them."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def fill_mesh(mesh: Mapping[str, int], target: Slice) -> dict[str, int]:
    """Return the sizes with a -1 filled in for the devices of a slice.

    Raises:
        MeshError: A size is invalid, or the sizes do not cover the slice; the message names sizes
            that would.
    """
    _check(mesh)
    sizes = _filled(mesh, target.devices)
    if sizes is None:
        known = prod(size for size in mesh.values() if size != -1)
        has = f"sizes whose product is {known}" if -1 in mesh.values() else f"{known} devices"
        would_do = refill_mesh(mesh, target.devices) or default_mesh(target)
        raise MeshError(
            f"the mesh {write_mesh(mesh)} has {has}, but {target} has {target.devices} devices; "
            f"write {write_mesh(fit_mesh(would_do, target.devices))}, or -1 for all that is left."
        )
    return sizes


def refill_mesh(mesh: Mapping[str, int], devices: int) -> dict[str, int] | None:
    """Return the same axes with -1 for the one that adapts to the number of devices.

    That axis is fsdp, or else data; the other axes keep their sizes. Return None if there is
    neither axis, or if `devices` is no multiple of the other sizes.
    """
    free = next((axis for axis in _FREE if axis in mesh), None)
    kept = prod(size for axis, size in mesh.items() if axis != free)
    if free is None or kept < 1 or devices % kept:
        return None
    return {axis: -1 if axis == free else size for axis, size in mesh.items()}


def fit_mesh(mesh: Mapping[str, int], devices: int) -> dict[str, int]:
    """Return the same axes on another number of devices, every size filled in.

    Sizes that cover the devices stay. Otherwise fsdp (data if there is no fsdp) takes the devices
    that the other axes leave. If `devices` is no multiple of the other sizes, that axis takes all
    devices and the others get size 1; without fsdp and data, the first axis does.

    Raises:
        MeshError: A size is invalid.
    """
    _check(mesh)
    refilled = refill_mesh(mesh, devices)
    sizes = _filled(mesh, devices) or (refilled and _filled(refilled, devices))
    if sizes:
        return sizes
    takes_all = next((axis for axis in _FREE if axis in mesh), next(iter(mesh)))
    return {axis: devices if axis == takes_all else 1 for axis in mesh}


def _check(mesh: Mapping[str, int]) -> None:
    if any(size < 1 and size != -1 for size in mesh.values()) or [*mesh.values()].count(-1) > 1:
        raise MeshError(
            f"the mesh {write_mesh(mesh)} has an invalid size; "
            "use whole numbers, and -1 at most once."
        )


def _filled(mesh: Mapping[str, int], devices: int) -> dict[str, int] | None:
    """Return the sizes on this many devices; None where they do not cover them exactly."""
    known = prod(size for size in mesh.values() if size != -1)
    left = devices // known if -1 in mesh.values() else 1
    sizes = {name: left if size == -1 else size for name, size in mesh.items()}
    return sizes if prod(sizes.values()) == devices else None
