"""Meshes: from a shape and axis names to devices in an order that suits the network."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from ...annotations import AnyMesh, Device
from ...errors import MeshError
from ...plain_data import JsonObject
from ...runtime.device_grid import arrange_devices
from ...runtime.environment import open_devices
from ...shown import Shown
from .axes import check_axis_names

MeshShape = Sequence[int] | Mapping[str, int]
"""Sizes in the order of the axes' names, or by name."""


@dataclass(frozen=True)
class MeshConfig(Shown):
    """The shape of a mesh, checked when it is made.

    Attributes:
        mesh_shape: Size of each axis inside one slice; one entry may be -1 for all remaining
            devices.
        axis_names: A name per axis, the axis with the most communication (tensor) last.
        devices: The devices to use; None takes all.
        dcn_mesh_shape: Size of each axis across slices. Axis i then has `mesh_shape[i] *
            dcn_mesh_shape[i]` devices.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    devices: Sequence[Device] | None = None
    dcn_mesh_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        names = check_axis_names(self.axis_names)
        shape = _drop_unnamed_ones(_check_sizes(self.mesh_shape, "mesh_shape"), names)
        object.__setattr__(self, "axis_names", names)
        object.__setattr__(self, "mesh_shape", shape)
        if self.dcn_mesh_shape is None:
            return
        dcn = _drop_unnamed_ones(_check_sizes(self.dcn_mesh_shape, "dcn_mesh_shape"), names)
        if -1 in dcn:
            raise MeshError(
                f"dcn_mesh_shape is {dcn}; -1 is only filled in for mesh_shape, "
                "so write the number of slices."
            )
        object.__setattr__(self, "dcn_mesh_shape", dcn)

    def resolve(self, device_count: int) -> tuple[int, ...]:
        """Return `mesh_shape` with its -1 filled in for `device_count` devices.

        Raises:
            MeshError: The shape does not cover exactly that many devices.
        """
        slices = math.prod(self.dcn_mesh_shape or (1,))
        known = math.prod(size for size in self.mesh_shape if size != -1)
        shape = " x ".join(map(str, self.mesh_shape))
        if slices > 1:
            shape += f" in each of {slices} slices"
        if -1 in self.mesh_shape:
            if device_count % (known * slices):
                raise MeshError(
                    f"Mesh {shape} cannot fill in its -1: {device_count} devices are not a "
                    f"multiple of {known * slices}; choose sizes whose product divides it."
                )
            left = device_count // (known * slices)
            return tuple(left if size == -1 else size for size in self.mesh_shape)
        if known * slices != device_count:
            raise MeshError(_wrong_count(shape, known * slices, device_count))
        return self.mesh_shape

    def to_dict(self) -> JsonObject:
        """Return the configuration as JSON data; devices become their count."""
        return {
            "mesh_shape": list(self.mesh_shape),
            "axis_names": list(self.axis_names),
            "devices": None if self.devices is None else len(self.devices),
            "dcn_mesh_shape": None if self.dcn_mesh_shape is None else list(self.dcn_mesh_shape),
        }


def create_mesh(
    mesh_config: MeshConfig | MeshShape | None = None,
    *,
    mesh_shape: MeshShape | None = None,
    axis_names: Sequence[str] | None = None,
    devices: Sequence[Device] | None = None,
    dcn_mesh_shape: Sequence[int] | None = None,
) -> Mesh:
    """Make a mesh whose device order suits the torus and the slices.

    Pass either a `MeshConfig` or the same values as keywords; a mapping such as `{"data": 2,
    "fsdp": -1}` gives shape and names at once. `devices` may come from an offline topology
    (`jax.experimental.topologies`), which gives a mesh to compile for but not to run on.

    Raises:
        MeshError: Shape, names and devices do not match.
    """
    config = _one_config(mesh_config, mesh_shape, axis_names, devices, dcn_mesh_shape)
    chosen = list(open_devices() if config.devices is None else config.devices)
    grid = arrange_devices(config.resolve(len(chosen)), chosen, dcn_shape=config.dcn_mesh_shape)
    # Auto is explicit, because jax's default differs between versions and layouts here are
    # constraints, which only Auto axes take.
    return Mesh(grid, config.axis_names, axis_types=(AxisType.Auto,) * len(config.axis_names))


def abstract_mesh(
    mesh_config: MeshConfig | MeshShape | None = None,
    *,
    mesh_shape: MeshShape | None = None,
    axis_names: Sequence[str] | None = None,
    dcn_mesh_shape: Sequence[int] | None = None,
) -> AbstractMesh:
    """Make a mesh without devices: enough to lay out and lower a program, not to run it.

    Raises:
        MeshError: A size is -1 (there are no devices to count) or shape and names differ.
    """
    config = _one_config(mesh_config, mesh_shape, axis_names, None, dcn_mesh_shape)
    if -1 in config.mesh_shape:
        raise MeshError(
            f"mesh_shape is {config.mesh_shape}, but an abstract mesh has no devices to fill in "
            "its -1; write every size."
        )
    dcn = config.dcn_mesh_shape or (1,) * len(config.mesh_shape)
    sizes = tuple(inner * outer for inner, outer in zip(config.mesh_shape, dcn, strict=True))
    return AbstractMesh(sizes, config.axis_names, axis_types=(AxisType.Auto,) * len(sizes))


def axis_sizes(mesh: AnyMesh) -> dict[str, int]:
    """Return the size of each axis of a mesh, by name."""
    return {str(name): int(size) for name, size in mesh.shape.items()}


def _one_config(
    config: MeshConfig | MeshShape | None,
    mesh_shape: MeshShape | None,
    axis_names: Sequence[str] | None,
    devices: Sequence[Device] | None,
    dcn_mesh_shape: Sequence[int] | None,
) -> MeshConfig:
    if config is not None and not isinstance(config, MeshConfig):
        if mesh_shape is not None:
            raise MeshError(f"A mesh got two shapes, {config} and {mesh_shape}; give one.")
        config, mesh_shape = None, config
    given = (mesh_shape, axis_names, devices, dcn_mesh_shape)
    if config is not None:
        if any(value is not None for value in given):
            raise MeshError(
                "A mesh got both a MeshConfig and keywords; put the values into the MeshConfig."
            )
        return config
    if isinstance(mesh_shape, (str, int)):
        raise MeshError(
            f"The shape of a mesh is {mesh_shape!r}; expected a size per axis: {{'data': 4}}."
        )
    if isinstance(mesh_shape, Mapping):
        if axis_names is not None:
            raise MeshError(f"mesh_shape {dict(mesh_shape)} names its axes; leave axis_names out.")
        mesh_shape, axis_names = tuple(mesh_shape.values()), tuple(mesh_shape)
    if mesh_shape is None or axis_names is None:
        missing = "mesh_shape" if mesh_shape is None else "axis_names"
        raise MeshError(f"A mesh needs {missing}; give both mesh_shape= and axis_names=.")
    if isinstance(axis_names, str):
        axis_names = (axis_names,)
    return MeshConfig(
        mesh_shape=tuple(mesh_shape),
        axis_names=tuple(axis_names),
        devices=devices,
        dcn_mesh_shape=None if dcn_mesh_shape is None else tuple(dcn_mesh_shape),
    )


def _check_sizes(sizes: Sequence[Any], what: str) -> tuple[int, ...]:
    checked = tuple(sizes)
    for size in checked:
        if isinstance(size, bool) or not hasattr(size, "__index__") or (size < 1 and size != -1):
            raise MeshError(
                f"{what} is {checked}, where {size!r} is not a size; use whole numbers of 1 or "
                "more, or one -1 for all that is left."
            )
    if checked.count(-1) > 1:
        raise MeshError(f"{what} is {checked} with more than one -1; only one can be filled in.")
    return tuple(int(size) for size in checked)


def _drop_unnamed_ones(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    """Drop trailing axes of size 1 without a name, which shard nothing."""
    kept = shape
    while len(kept) > len(names) and kept[-1] == 1:
        kept = kept[:-1]
    if len(kept) != len(names):
        raise MeshError(
            f"The mesh shape {shape} has {len(shape)} axes but {len(names)} names {names}; "
            "give each axis a name (only a trailing axis of size 1 may go without)."
        )
    return kept


def _wrong_count(shape: str, needed: int, present: int) -> str:
    seen = f"Mesh {shape} needs {needed} devices, {present} here"
    if needed < present:
        return f"{seen}; use -1 for one axis, or pass devices=jax.devices()[:{needed}]."
    return (
        f"{seen}; to try it on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={needed} "
        "before jax starts, and to compile without devices use abstract_mesh()."
    )


def mesh_here(
    sizes: Mapping[str, int],
    devices: Sequence[Device],
    *,
    dcn_mesh_shape: Sequence[int] | None = None,
) -> Mesh:
    """Return the mesh of these sizes on these devices; `dcn_mesh_shape` is the part across slices.

    Raises:
        MeshError: The sizes do not cover exactly these devices.
    """
    names = tuple(sizes)
    across = (1,) * len(sizes) if dcn_mesh_shape is None else tuple(dcn_mesh_shape)
    if len(across) != len(sizes):
        raise MeshError(
            f"dcn_mesh_shape={across} has {len(across)} sizes, but the mesh has the axes "
            f"{', '.join(names)}; give each axis its factor across slices."
        )
    resolved = MeshConfig(tuple(sizes.values()), names).resolve(len(devices))
    if uneven := [
        name for name, size, outer in zip(names, resolved, across, strict=True) if size % outer
    ]:
        raise MeshError(
            f"axis '{uneven[0]}' of {resolved} cannot be divided by dcn_mesh_shape={across}; use "
            "factors that divide the sizes."
        )
    return create_mesh(
        mesh_shape=tuple(size // outer for size, outer in zip(resolved, across, strict=True)),
        axis_names=names,
        devices=list(devices),
        dcn_mesh_shape=across if max(across) > 1 else None,
    )
