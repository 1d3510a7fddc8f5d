"""The roles of mesh axis names, names for axes given as numbers, and a shape's default sharding.

Every strategy reads one table of names; nothing here needs jax.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ...errors import MeshError, did_you_mean

Role = Literal["replica", "data", "fsdp", "tensor", "expert", "stage", "context"]

# Many names are in use for the same role.
ROLE_OF_AXIS: dict[str, Role] = {
    "dcn": "replica",
    "replica": "replica",
    "slice": "replica",
    "data": "data",
    "batch": "data",
    "dp": "data",
    "fsdp": "fsdp",
    "zero": "fsdp",
    "model": "tensor",
    "tensor": "tensor",
    "tp": "tensor",
    "mp": "tensor",
    "expert": "expert",
    "experts": "expert",
    "ep": "expert",
    "stage": "stage",
    "pipeline": "stage",
    "pp": "stage",
    "context": "context",
    "sequence": "context",
    "seq": "context",
    "cp": "context",
    "sp": "context",
}

# These axes shard a batch by examples. An expert axis is one of them outside the expert layers,
# where all-to-all exchanges examples for experts.
BATCH_ROLES: tuple[Role, ...] = ("replica", "data", "fsdp", "expert")
# Roles of the axes of a mesh given as numbers.
_NAMES = {1: ("fsdp",), 2: ("fsdp", "tensor"), 3: ("data", "fsdp", "tensor")}

MeshShape = Sequence[int] | Mapping[str, int]


def role_of(axis: str) -> Role:
    """Return the role of an axis.

    Raises:
        MeshError: The name is not in the table.
    """
    try:
        return ROLE_OF_AXIS[axis]
    except KeyError:
        raise MeshError(
            f"Mesh axis {axis!r} has no known role; known names are "
            f"{', '.join(ROLE_OF_AXIS)}.{did_you_mean(axis, ROLE_OF_AXIS)}"
        ) from None


def axes_with_role(axis_names: Iterable[object], *roles: Role) -> tuple[str, ...]:
    """Return the axes of a mesh with one of `roles`, in mesh order; unknown names are left out."""
    return tuple(
        axis for axis in axis_names if isinstance(axis, str) and ROLE_OF_AXIS.get(axis) in roles
    )


def names_of_role(role: Role) -> tuple[str, ...]:
    """Return the axis names of a role, the preferred one first."""
    return tuple(name for name, known in ROLE_OF_AXIS.items() if known == role)


def count_batch_ways(sizes: Mapping[str, int]) -> int:
    """Count the devices that share a batch's examples on a mesh of these sizes."""
    ways = 1
    for axis, size in sizes.items():
        ways *= size if role_of(axis) in BATCH_ROLES else 1
    return ways


def share_experts(experts: int, axes: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the axes that the experts divide over, and those left for another dimension."""
    own: dict[str, int] = {}
    for axis, size in axes.items():
        if experts % size == 0:
            experts //= size
            own[axis] = size
    return own, {axis: size for axis, size in axes.items() if axis not in own}


def check_axis_names(axis_names: Sequence[object]) -> tuple[str, ...]:
    """Return `axis_names` as a tuple of distinct strings.

    Raises:
        MeshError: A name is empty, not a string, or used twice.
    """
    names: list[str] = []
    for name in axis_names:
        if not isinstance(name, str) or not name:
            raise MeshError(f"A mesh axis name is {name!r}; it must be a word such as 'data'.")
        if name in names:
            raise MeshError(
                f"Mesh axis {name!r} appears twice in {tuple(axis_names)}; "
                "give each axis its own name."
            )
        names.append(name)
    return tuple(names)


def name_axes(shape: MeshShape | None) -> dict[str, int]:
    """Return sizes by axis name; numbers are fsdp, fsdp x tensor, or data x fsdp x tensor.

    Raises:
        MeshError: There are more numbers than names.
    """
    if shape is None:
        return {"fsdp": -1}
    if isinstance(shape, Mapping):
        return {str(name): int(size) for name, size in shape.items()}
    if len(shape) not in _NAMES:
        raise MeshError(
            f"mesh_shape={tuple(shape)} has {len(shape)} axes but no names; give them names: "
            "mesh_shape={'data': 2, 'fsdp': 4, …}."
        )
    return dict(zip(_NAMES[len(shape)], shape, strict=True))


def spec_for_shape(
    shape: Sequence[int], axis_names: Sequence[str] = ("data", "model")
) -> tuple[str | None, ...]:
    """Return the mesh axis of each dimension: the first axis on the first, the second on the last.

    A vector takes the first axis, a scalar none; with one axis name only the first dimension is
    sharded. Pass it to jax as `PartitionSpec(*spec_for_shape(shape))`.
    """
    names = tuple(axis_names)
    rank = len(shape)
    entries: list[str | None] = [None] * rank
    if rank and names:
        entries[0] = names[0]
    if rank > 1 and len(names) > 1:
        entries[-1] = names[1]
    return tuple(entries)
