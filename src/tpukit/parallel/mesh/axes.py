"""What each mesh axis name means: one table that every strategy reads."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ...errors import MeshError, did_you_mean

Role = Literal["replica", "data", "fsdp", "tensor", "expert", "stage", "context"]

# Many names are in use for the same thing; the role is what the axis is for.
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

# Every example of a batch is whole on one coordinate of these axes. An expert axis is one of
# them outside the expert layers, where all-to-all trades examples for experts.
BATCH_ROLES: tuple[Role, ...] = ("replica", "data", "fsdp", "expert")


def role_of(axis: str) -> Role:
    """Return what the axis called `axis` is for.

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
    """The axes of a mesh that play one of `roles`, in mesh order; other names are left out."""
    return tuple(
        axis for axis in axis_names if isinstance(axis, str) and ROLE_OF_AXIS.get(axis) in roles
    )


def names_of_role(role: Role) -> tuple[str, ...]:
    """The axis names that mean `role`, the preferred one first."""
    return tuple(name for name, known in ROLE_OF_AXIS.items() if known == role)


def count_batch_ways(sizes: Mapping[str, int]) -> int:
    """Count the devices that share a batch's examples on a mesh of these sizes."""
    ways = 1
    for axis, size in sizes.items():
        ways *= size if role_of(axis) in BATCH_ROLES else 1
    return ways


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
