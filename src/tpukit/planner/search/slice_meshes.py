"""Where a step can run: a slice, a mesh over its devices, and how several slices are joined."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...hardware import Slice
from ..cost.memory_model import ADAMW_BYTES
from ..cost.model_shape import ModelShape
from ..cost.torus import AXES, Links, place_axes

LARGEST_TENSOR = 16
STAGES = (2, 4, 8)
# A context axis pays once a single example is more than a device can hold. It is split into parts
# as long as the whole examples of most runs, so that longer examples have every layout of shorter
# ones.
LEAST_CONTEXT_TOKENS = 8192
CONTEXTS = (2, 4, 8, 16)


@dataclass(frozen=True)
class SliceMesh:
    """A slice and a mesh over all of its devices.

    `sizes` are those inside one slice. Slices are joined by `data`, where each holds all weights,
    or by `fsdp`, where they share them and gather them over the network.
    """

    slice: Slice
    sizes: dict[str, int]
    links: dict[str, Links] = field(repr=False)
    joined_by: str = "data"

    @property
    def joined_sizes(self) -> dict[str, int]:
        """Size of each axis over all slices, axes of 1 left out."""
        joined = self.sizes.get(self.joined_by, 1) * self.slice.num_slices
        whole = {**self.sizes, self.joined_by: joined}
        used = {axis: whole.get(axis, 1) for axis in AXES if whole.get(axis, 1) > 1}
        return used or {"fsdp": 1}

    @property
    def dcn_mesh(self) -> tuple[int, ...] | None:
        """The part of each axis that crosses slices; None for one slice."""
        if self.slice.num_slices == 1:
            return None
        count = self.slice.num_slices
        return tuple(count if axis == self.joined_by else 1 for axis in self.joined_sizes)


def meshes_on(
    on: Slice,
    shape: ModelShape,
    sequence_length: int,
    *,
    pipeline: bool,
    optimizer_bytes: float = ADAMW_BYTES,
) -> Iterator[SliceMesh]:
    """The meshes worth considering for a model on a slice, or on several joined.

    Args:
        on: Where it runs.
        shape: The model.
        sequence_length: Tokens in an example.
        pipeline: Whether layers may be split into stages.
        optimizer_bytes: State of the optimizer for one parameter.
    """
    state_bytes = shape.state_bytes(optimizer_bytes)
    devices = on.devices // on.num_slices
    longest = sequence_length // LEAST_CONTEXT_TOKENS
    contexts = (1, *(size for size in CONTEXTS if size <= longest))
    for tensor in _tensor_sizes(shape):
        for expert in _divisors_by_two(shape.experts):
            for context in contexts:
                inner = tensor * expert * context
                if devices % inner == 0 and (context == 1 or tensor * expert == 1):
                    sizes = {"tensor": tensor, "expert": expert, "context": context}
                    sizes["fsdp"] = devices // inner
                    yield _slice_mesh(on, sizes)
                    if _fills_a_slice(state_bytes, on):
                        yield _slice_mesh(on, sizes, joined_by="fsdp")
    if pipeline and not shape.experts and shape.thin is None:
        for stage in STAGES:
            if shape.layers % stage == 0 and devices % stage == 0:
                yield _slice_mesh(on, {"stage": stage, "fsdp": devices // stage})


def _fills_a_slice(state_bytes: float, on: Slice) -> bool:
    """Whether slices had better share weights and moments: in one they take half of its memory.

    Where there is room, sharing gains nothing that would be worth two gathers over the network in
    every step.
    """
    total = on.hbm_bytes.value
    if on.num_slices == 1 or total is None:
        return False
    return state_bytes > total / on.num_slices / 2


def _slice_mesh(on: Slice, sizes: dict[str, int], *, joined_by: str = "data") -> SliceMesh:
    return SliceMesh(on, sizes, place_axes(on, sizes), joined_by)


def _tensor_sizes(shape: ModelShape) -> list[int]:
    """Powers of two that cut no head and no hidden channel in two."""
    return [
        size
        for size in (1, 2, 4, 8, LARGEST_TENSOR)
        if shape.heads % size == 0 and shape.d_ff % size == 0 and shape.kv_heads % size == 0
    ]


def _divisors_by_two(experts: int) -> list[int]:
    sizes = [1]
    while experts and experts % (sizes[-1] * 2) == 0:
        sizes.append(sizes[-1] * 2)
    return sizes
