"""Example arguments with shardings, as jax writes them: `bf16[8192@fsdp,4096@(data,tensor)]`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...errors import MeshError, TPUValidationError, did_you_mean
from ...hardware import Slice
from ...hardware.mesh_sizes import fill_mesh
from .entry import parse_argument
from .request import as_abstract_mesh

EXAMPLE = "bf16[8192@fsdp,4096]"
_SHAPE = re.compile(r"(.*)\[(.*)\]\s*", re.DOTALL)
_DIMENSION = re.compile(r"\s*([^@()]*?)\s*(?:@\s*(?:([^@(),\s]+)|\(([^@()]*)\))\s*)?")
_COMMA = re.compile(r",(?![^(]*\))")  # between dimensions, not between axes of one of them


@dataclass(frozen=True)
class _Described:
    """An array as it was typed: its shape without axes, and the axes that split each dimension."""

    text: str
    plain: str
    axes: tuple[tuple[str, ...], ...]


def sharded_arguments(
    texts: Sequence[str], target: Slice, mesh: Mapping[str, int] | None = None
) -> list[Any]:
    """Return a `jax.ShapeDtypeStruct` per text, laid out on the devices of a slice.

    Args:
        texts: "bf16[8192@fsdp,4096]" splits the first dimension along fsdp. Where no text names
            an axis and no mesh is given, arguments have no sharding.
        target: The slice.
        mesh: Size of each axis; by default the only axis that is named has all devices.

    Raises:
        TPUValidationError: A text describes no array, or an axis divides no dimension of it.
        MeshError: The mesh is not one of the slice, or lacks an axis.
    """
    described = [_describe(text) for text in texts]
    arrays = [parse_argument(one.plain) for one in described]
    named = list(dict.fromkeys(axis for one in described for dim in one.axes for axis in dim))
    if mesh is None and not named:
        return arrays
    if mesh is None and len(named) > 1:
        raise MeshError(
            f"--arg names the mesh axes {', '.join(named)}, but not their sizes; write "
            f"--mesh {','.join(f'{axis}=…' for axis in named)} for the {target.devices} devices "
            f"of {target}."
        )
    sizes = fill_mesh(mesh or {named[0]: -1}, target)
    for axis in named:
        if axis not in sizes:
            raise MeshError(
                f"--arg names the mesh axis {axis!r}, but the mesh has {', '.join(sizes)}."
                + did_you_mean(axis, sizes)
            )
    return [
        _laid_out(one, array, sizes, target) for one, array in zip(described, arrays, strict=True)
    ]


def _describe(text: str) -> _Described:
    found = _SHAPE.fullmatch(text)
    if found is None:
        return _Described(text, text, ())  # parse_argument says what is wrong
    sizes: list[str] = []
    axes: list[tuple[str, ...]] = []
    for part in _COMMA.split(found[2]):
        dimension = _DIMENSION.fullmatch(part)
        listed = "" if dimension is None else dimension[2] or dimension[3] or ""
        if dimension is None or ("@" in part and not (dimension[1] and listed.strip())):
            raise TPUValidationError(
                f"{text!r} has a dimension {part.strip()!r} that cannot be read; write its size, "
                f"and the mesh axes that split it behind @: {EXAMPLE}."
            )
        sizes.append(dimension[1])
        axes.append(tuple(name.strip() for name in listed.split(",") if name.strip()))
    named = [axis for dim in axes for axis in dim]
    if len(set(named)) < len(named):
        raise TPUValidationError(
            f"{text!r} splits two dimensions along one mesh axis; name each axis once."
        )
    return _Described(text, f"{found[1]}[{','.join(sizes)}]", tuple(axes))


def _laid_out(one: _Described, array: Any, sizes: Mapping[str, int], target: Slice) -> Any:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    for size, axes in zip(array.shape, one.axes, strict=False):
        ways = prod(sizes[axis] for axis in axes)
        if size % ways:
            raise TPUValidationError(
                f"{one.text!r} splits a dimension of {size} into {ways} parts, which leaves a "
                f"rest; make it a multiple of {ways}, or name other axes."
            )
    spec = PartitionSpec(*(axes or None for axes in one.axes)) if array.shape else PartitionSpec()
    sharding = NamedSharding(as_abstract_mesh(sizes, target), spec)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
