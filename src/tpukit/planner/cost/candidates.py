"""Enumerate the candidates of a plan: slices, meshes, batches, remat policies, number formats."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from ...errors import ConfigError, did_you_mean
from ...hardware import Chip, Slice, get_chip, list_chips, list_slices
from ...hardware.catalog import chips_considered_for
from ...hardware.formats import spelled_as
from ...models.remat.policy import FULL, MINIMAL, NONE
from ...runtime.ranges import Range
from ...step.optimizer_spec import (
    MOMENT_DTYPES,
    MomentDtype,
    OptimizerName,
    OptimizerSpec,
    state_bytes_per_parameter,
)
from .memory_model import ADAMW_BYTES
from .model_shape import ModelShape
from .torus import AXES, Links, place_axes

LARGEST_TENSOR = 16
STAGES = (2, 4, 8)
# A context axis pays once one example exceeds a device's memory. Each shard is as long as a typical
# whole example, so longer examples have all layouts of shorter ones.
LEAST_CONTEXT_TOKENS = 8192
CONTEXTS = (2, 4, 8, 16)


@dataclass(frozen=True)
class SliceMesh:
    """A slice and a mesh over all of its devices.

    `sizes` are those inside one slice. Slices are joined by `data`, where each has all weights, or
    by `fsdp`, where they shard the weights and gather them over the data-center network.
    """

    slice: Slice
    sizes: dict[str, int]
    links: dict[str, Links] = field(repr=False)
    joined_by: str = "data"

    @property
    def joined_sizes(self) -> dict[str, int]:
        """Size of each axis over all slices, without axes of size 1."""
        joined = self.sizes.get(self.joined_by, 1) * self.slice.num_slices
        whole = {**self.sizes, self.joined_by: joined}
        used = {axis: whole.get(axis, 1) for axis in AXES if whole.get(axis, 1) > 1}
        return used or {"fsdp": 1}

    @property
    def dcn_mesh(self) -> tuple[int, ...] | None:
        """The factor of each axis across slices; None for one slice."""
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
    """Yield the meshes worth considering for a model on a slice, or on several joined.

    Args:
        on: The slice.
        shape: The model.
        sequence_length: Tokens in an example.
        pipeline: Whether pipeline stages are allowed.
        optimizer_bytes: Optimizer state per parameter.
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
    """Whether slices should shard weights and moments, because these fill half of a slice's memory.

    If there is memory, sharding is not worth two gathers over the network in every step.
    """
    total = on.hbm_bytes.value
    if on.num_slices == 1 or total is None:
        return False
    return state_bytes > total / on.num_slices / 2


def _slice_mesh(on: Slice, sizes: dict[str, int], *, joined_by: str = "data") -> SliceMesh:
    return SliceMesh(on, sizes, place_axes(on, sizes), joined_by)


def _tensor_sizes(shape: ModelShape) -> list[int]:
    """Return powers of two that divide the heads and the hidden width."""
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


# Generations with measured rates for the step model.
GENERATIONS = chips_considered_for("training")
# Remat policies as in job files, from the most to the least memory.
REMATS = (
    NONE,
    "save=qkv_proj,attention,out_proj,mlpwi",
    MINIMAL,
    "save=attention",
    "offload=attention",
    FULL,
    "offload=decoder_layer_input",
)
PRECISIONS = ("bf16", "int8", "fp8")
# Formats of the optimizer's moments to try by default; int8 only on request.
USUAL_MOMENTS: tuple[MomentDtype, ...] = ("float32", "bfloat16")
# Most tokens per device and microbatch, for example 32 examples of 8192.
LARGEST_DEVICE_TOKENS = 2**18
MICROBATCHES = (1, 2, 4, 8)
MOST_CHIPS = 10**6
SLICE_COUNTS = (1, 2, 4, 8, 16)
_COLUMNS = ("mesh", "batch", "microbatches", "remat", "precision", "optimizer")


def optimizers_of(name: str, moment_dtype: str | None = None) -> tuple[OptimizerSpec, ...]:
    """Return an optimizer with moments in one format, or once per usual format.

    Raises:
        ConfigError: There is no such optimizer, or it has no moments of that format.
    """
    optimizer = OptimizerSpec(name=cast(OptimizerName, name))
    if moment_dtype is not None:
        dtype = spelled_as(moment_dtype, MOMENT_DTYPES) or moment_dtype
        return (replace(optimizer, moment_dtype=cast(MomentDtype, dtype)),)
    if name == "adafactor":  # it has no first moment
        return (optimizer,)
    return tuple(replace(optimizer, moment_dtype=dtype) for dtype in USUAL_MOMENTS)


@dataclass(frozen=True)
class Space:
    """The ranges that are searched.

    Attributes:
        generations: Names of chips, or slices such as "v6e-64".
        max_chips: Most chips over all slices.
        multi_slice: Whether slices may be joined by the data-center network.
        batches: Examples per batch shard and microbatch; by default `usual_batches`.
        optimizers: The optimizer, once per format of its moments.
    """

    generations: Sequence[str] = GENERATIONS
    max_chips: int | None = None
    multi_slice: bool = True
    pipeline: bool = True
    batches: Sequence[int] | None = None
    microbatches: Sequence[int] = MICROBATCHES
    remats: Sequence[str] = REMATS
    precisions: Sequence[str] = ("bf16",)
    optimizers: tuple[OptimizerSpec, ...] = optimizers_of("adamw")

    def __post_init__(self) -> None:
        for setting, known, what in (
            ("remats", REMATS, "remat"),
            ("precisions", PRECISIONS, "precision"),
        ):
            chosen = [(name, spelled_as(name, known)) for name in getattr(self, setting)]
            for name, found in chosen:
                if found is None:
                    raise ConfigError(
                        f"{what} '{name}' is not one of {', '.join(known)}."
                        + did_you_mean(name, known)
                    )
            object.__setattr__(self, setting, tuple(found for _, found in chosen))
        if self.max_chips is not None:
            Range(1, MOST_CHIPS).check_whole("max_chips", self.max_chips)
        chips = {on.chip for on in self.slices}
        if not chips:
            self._refuse_empty()
        for name in self.precisions:
            if not any(_has_rate(chip, name) for chip in chips):
                able = [chip.name for chip in list_chips() if _has_rate(chip, name)]
                raise ConfigError(
                    f"no chip of {', '.join(sorted(chip.name for chip in chips))} multiplies "
                    f"{name} faster than bf16; {' and '.join(able)} do. Leave {name} out of "
                    "--precision, or name another generation."
                )

    def _refuse_empty(self) -> None:
        """Raise because no slice is left to search; the message names the smallest one."""
        found = [on for name in self.generations for on in _slices_of(name)]
        if not found:
            raise ConfigError("no slice is named; write --on v6e, or --on v6e-64.")
        least = min(found, key=lambda on: (on.chips, on.num_slices))
        if self.max_chips is not None:
            refuse_too_many_chips(least, self.max_chips)
        raise ConfigError(f"{least} joins several slices; allow that (--multi-slice).")

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """Every slice within `max_chips`, alone and joined."""
        named = dict.fromkeys(on for name in self.generations for on in _slices_of(name))
        most = self.max_chips or math.inf
        several = self.multi_slice
        return tuple(on for on in named if on.chips <= most and (several or on.num_slices == 1))


def _slices_of(name: str) -> Iterator[Slice]:
    """Yield the slices of a name: all of a generation, alone and joined, or one slice."""
    one = named_slice(name)
    if one is not None:
        refuse_unknown_rates(one.chip)
        yield one
        return
    chip = get_chip(name.strip())
    refuse_unknown_rates(chip)
    for one in list_slices(chip.name):
        if not _is_usual(one.chips):
            continue
        yield one
        # Joining is useful only for whole pods or large slices.
        if one.chips >= min(256, max(s.chips for s in list_slices(chip.name))):
            for count in SLICE_COUNTS[1:]:
                yield Slice(chip, one.topology, count)


def named_slice(name: str) -> Slice | None:
    """Return the slice of a name such as "v6e-64"; None for a generation's name."""
    text = name.strip()
    whole = any(mark in text for mark in "-:") and not text.lower().startswith("tpu v")
    return Slice.parse(text) if whole else None


def refuse_too_many_chips(one: Slice, max_chips: int | None) -> None:
    """Raise if the smallest slice to choose from has more chips than allowed."""
    if max_chips is not None and one.chips > max_chips:
        raise ConfigError(
            f"{one}, the smallest slice to choose from, has {one.chips:,} chips, but max_chips is "
            f"{max_chips:,}; name a smaller slice, or allow more chips."
        )


def unknown_rate(chip: Chip) -> str:
    """Return why the catalog lacks a rate that every plan needs; "" if it has all."""
    if chip.no_slices:
        return chip.no_slices
    for what, figure in (("HBM", chip.hbm_gbps), ("link", chip.ici_link_effective_gbps)):
        if figure.value is None:
            return f"its {what} bandwidth is not known: {figure.reason.rstrip('.')}"
    return ""


def refuse_unknown_rates(chip: Chip) -> None:
    """Raise if the rates of a chip are unknown."""
    if reason := unknown_rate(chip):
        raise ConfigError(
            f"{chip.name} cannot be planned for, because {reason}; use one of "
            f"{', '.join(GENERATIONS)}."
        )


def _is_usual(chips: int) -> bool:
    """Whether a count is a power of two, or three times one."""
    odd = chips // (chips & -chips)
    return odd in (1, 3)


def _has_rate(chip: Chip, precision: str) -> bool:
    """Whether a chip multiplies a format at its own rate; every chip does so for bf16."""
    return precision == "bf16" or chip.multiplies(precision)


def usual_batches(sequence_length: int) -> tuple[int, ...]:
    """Return powers of two, and three times those, up to a fixed number of tokens.

    Short examples need a larger batch to fill a device; long ones may be sharded along `context`.
    """
    most = max(1, LARGEST_DEVICE_TOKENS * max(CONTEXTS) // sequence_length)
    powers = [2**power for power in range(most.bit_length())]
    return tuple(sorted(size for two in powers for size in (two, 3 * two) if size <= most))


@dataclass(frozen=True)
class Candidates:
    """Candidates as arrays with one entry each; candidate i runs on `meshes[mesh[i]]`.

    `remat`, `precision` and `optimizer` are indices into `remats`, `PRECISIONS` and `optimizers`.
    """

    meshes: tuple[SliceMesh, ...]
    mesh: np.ndarray
    batch: np.ndarray
    microbatches: np.ndarray
    remat: np.ndarray
    precision: np.ndarray
    optimizer: np.ndarray
    remats: tuple[str, ...] = REMATS
    optimizers: tuple[OptimizerSpec, ...] = optimizers_of("adamw")

    def __len__(self) -> int:
        return len(self.mesh)

    def take(self, chosen: np.ndarray) -> "Candidates":
        """Return the candidates at these indices."""
        picked: dict[str, Any] = {name: getattr(self, name)[chosen] for name in _COLUMNS}
        return replace(self, **picked)

    @cached_property
    def sizes(self) -> dict[str, np.ndarray]:
        """Devices along each axis inside one slice."""
        return {
            axis: self.of_mesh([mesh.sizes.get(axis, 1) for mesh in self.meshes]) for axis in AXES
        }

    @cached_property
    def num_slices(self) -> np.ndarray:
        """Slices of each candidate."""
        return self.of_mesh([mesh.slice.num_slices for mesh in self.meshes])

    @cached_property
    def slices_sharing(self) -> np.ndarray:
        """Slices that share one copy of the weights."""
        joined = [one.joined_by == "fsdp" for one in self.meshes]
        return np.where(self.of_mesh(joined), self.num_slices, 1)

    @cached_property
    def chips(self) -> np.ndarray:
        """Chips of each candidate, over all slices."""
        return self.of_mesh([mesh.slice.chips for mesh in self.meshes])

    @cached_property
    def batch_ways(self) -> np.ndarray:
        """Shards of a batch."""
        sizes = self.sizes
        return sizes["data"] * sizes["fsdp"] * sizes["expert"] * self.num_slices

    @property
    def int8_moments(self) -> np.ndarray:
        """Whether the optimizer's moments are int8."""
        return np.asarray([one.moment_dtype == "int8" for one in self.optimizers])[self.optimizer]

    @property
    def examples(self) -> np.ndarray:
        """Examples per step."""
        return self.batch * self.microbatches * self.batch_ways

    def of_mesh(self, values: Sequence[float]) -> np.ndarray:
        """Return an array with the value of each candidate's mesh."""
        return np.asarray(values)[self.mesh]


def enumerate_candidates(
    shape: ModelShape,
    space: Space,
    *,
    sequence_length: int,
    max_batch_tokens: float,
    fixed_examples: int | None = None,
) -> Candidates:
    """Return all combinations whose step has at most `max_batch_tokens` tokens.

    With `fixed_examples`, a step has exactly this many examples.
    """
    shapes = shape.trained_shapes
    widest = max(state_bytes_per_parameter(one, shapes) for one in space.optimizers)
    meshes = tuple(
        mesh
        for on in space.slices
        for mesh in meshes_on(
            on, shape, sequence_length, pipeline=space.pipeline, optimizer_bytes=widest
        )
    )
    batches = space.batches or usual_batches(sequence_length)
    columns = np.meshgrid(
        np.arange(len(meshes)),
        np.asarray(batches if fixed_examples is None else (1,)),
        np.asarray(space.microbatches),
        np.asarray([REMATS.index(name) for name in space.remats]),
        np.asarray([PRECISIONS.index(name) for name in space.precisions]),
        np.arange(len(space.optimizers)),
        indexing="ij",
    )
    values: dict[str, Any] = {
        name: column.ravel() for name, column in zip(_COLUMNS, columns, strict=True)
    }
    everything = Candidates(meshes=meshes, optimizers=space.optimizers, **values)
    if tuple(space.precisions) != ("bf16",):
        faster = np.asarray(
            [[_has_rate(one.slice.chip, name) for name in PRECISIONS] for one in meshes]
        )
        everything = everything.take(np.flatnonzero(faster[everything.mesh, everything.precision]))
    if fixed_examples is not None:
        shares = everything.examples
        everything = replace(everything, batch=fixed_examples // shares)
        everything = everything.take(np.flatnonzero(fixed_examples % shares == 0))
        max_batch_tokens = math.inf
    tokens = everything.examples * sequence_length
    # A pipeline with fewer microbatches than stages is mostly idle.
    filled = everything.microbatches >= everything.sizes["stage"]
    held = everything.batch * sequence_length / everything.sizes["context"]
    is_small = (held <= LARGEST_DEVICE_TOKENS) | (everything.batch == 1)
    if space.batches is not None or fixed_examples is not None:
        is_small = np.ones(len(everything), bool)  # as they were asked for
    return everything.take(np.flatnonzero((tokens <= max_batch_tokens) & filled & is_small))
