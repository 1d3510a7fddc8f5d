"""Which mesh axes an expert layer is mapped over by hand, and what it splits along them."""

import math
from dataclasses import dataclass

from jax.sharding import AxisType

from ...annotations import AnyMesh
from ..mesh.axes import axes_with_role
from ..mesh.mesh import axis_sizes


@dataclass(frozen=True)
class ExpertRegion:
    """The mesh axes that an expert layer maps over by hand, and what it splits along them.

    A Pallas kernel sees one device's arrays: nobody can partition it from outside, so it can be
    used only where no axis is left to the partitioner.

    Attributes:
        axes: Every axis the layer is mapped over; empty when it needs no region.
        hidden_axes: Those that split the experts' hidden dimension, whose outputs add up.
        hidden_parts: Into how many parts they split it.
        is_whole: Whether no axis is left to the partitioner.
    """

    axes: frozenset[str]
    hidden_axes: tuple[str, ...]
    hidden_parts: int
    is_whole: bool


def manual_axes(mesh: AnyMesh) -> frozenset[str]:
    """Axes that a region around this one maps over already."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Manual)


def region_of(mesh: AnyMesh, token_axes: tuple[str, ...], *, hidden_width: int) -> ExpertRegion:
    """The region for tokens split over `token_axes` and experts of `hidden_width`.

    Tensor-parallel axes split the hidden dimension when they divide it. Where they do not, or an
    axis is left that means something else, all but the tokens' axes stay automatic.
    """
    sizes = axis_sizes(mesh)
    already = manual_axes(mesh)
    rest = [name for name in sizes if name not in already and name not in token_axes]
    tensor = tuple(name for name in axes_with_role(rest, "tensor") if sizes[name] > 1)
    parts = math.prod(sizes[name] for name in tensor)
    if hidden_width % parts or any(sizes[name] > 1 for name in rest if name not in tensor):
        return ExpertRegion(frozenset(token_axes), (), 1, is_whole=False)
    return ExpertRegion(frozenset((*token_axes, *rest)), tensor, parts, is_whole=True)
