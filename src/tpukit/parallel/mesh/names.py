"""Names for the axes of a mesh that was given as numbers alone."""

from collections.abc import Mapping, Sequence

from ...errors import MeshError

# What each axis of a mesh that was given as numbers alone is for.
_NAMES = {1: ("fsdp",), 2: ("fsdp", "tensor"), 3: ("data", "fsdp", "tensor")}

MeshShape = Sequence[int] | Mapping[str, int]


def name_axes(shape: MeshShape | None) -> dict[str, int]:
    """Return sizes by axis name; numbers alone are fsdp, fsdp x tensor, or data x fsdp x tensor.

    Raises:
        MeshError: There are more numbers than names.
    """
    if shape is None:
        return {"fsdp": -1}
    if isinstance(shape, Mapping):
        return {str(name): int(size) for name, size in shape.items()}
    if len(shape) not in _NAMES:
        raise MeshError(
            f"mesh_shape={tuple(shape)} has {len(shape)} axes and no names; give them names: "
            "mesh_shape={'data': 2, 'fsdp': 4, …}."
        )
    return dict(zip(_NAMES[len(shape)], shape, strict=True))
