"""Every way worth considering to run a training step: slices, meshes, batches, remat, formats."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from ...errors import ConfigError, did_you_mean
from ...hardware import Chip, Slice, get_chip, list_chips, list_slices
from ...hardware.formats import spelled_as
from ...runtime.ranges import Range
from ...step.optimizer.spec import (
    MOMENT_DTYPES,
    MomentDtype,
    OptimizerName,
    OptimizerSpec,
    state_bytes_per_parameter,
)
from ..cost.model_shape import ModelShape
from ..cost.torus import AXES
from .slice_meshes import CONTEXTS, SliceMesh, meshes_on

# Generations whose ops were measured, so that the step model has constants for them.
GENERATIONS = ("v5e", "v5p", "v6e", "7x")
# As job files spell them, from what keeps the most to what keeps the least on the device.
REMATS = (
    "none",
    "save=qkv_proj,attention,out_proj,mlpwi",
    "minimal",
    "save=attention",
    "offload=attention",
    "full",
    "offload=decoder_layer_input",
)
PRECISIONS = ("bf16", "int8", "fp8")
# Of the optimizer's moments, where the format is left open; int8 is for who asks for it.
USUAL_MOMENTS: tuple[MomentDtype, ...] = ("float32", "bfloat16")
# The most tokens that a device is given of one micro-batch: 32 examples of 8192, say.
LARGEST_DEVICE_TOKENS = 2**18
MICROBATCHES = (1, 2, 4, 8)
MOST_CHIPS = 10**6
SLICE_COUNTS = (1, 2, 4, 8, 16)
_COLUMNS = ("mesh", "batch", "microbatches", "remat", "precision", "optimizer")


def optimizers_of(name: str, moment_dtype: str | None = None) -> tuple[OptimizerSpec, ...]:
    """An optimizer with moments of one format, or of each worth weighing.

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
    """What is searched.

    Attributes:
        generations: Names as `get_chip` takes them, or whole slices such as "v6e-64".
        max_chips: The most chips, all slices together.
        multi_slice: Whether several slices may be joined by the data-centre network.
        batches: Examples a batch way takes in one micro-batch; by default `usual_batches`.
        optimizers: The one to train with, by the format of its moments.
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
        for field, known, what in (
            ("remats", REMATS, "remat"),
            ("precisions", PRECISIONS, "precision"),
        ):
            chosen = [(name, spelled_as(name, known)) for name in getattr(self, field)]
            for name, found in chosen:
                if found is None:
                    raise ConfigError(
                        f"{what} '{name}' is not one of {', '.join(known)}."
                        + did_you_mean(name, known)
                    )
            object.__setattr__(self, field, tuple(found for _, found in chosen))
        if self.max_chips is not None:
            Range(1, MOST_CHIPS).check_whole("max_chips", self.max_chips)
        chips = {on.chip for on in self.slices()}
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
        """Raise because no slice is left to search; the message names the nearest one."""
        found = [on for name in self.generations for on in _slices_of(name)]
        if not found:
            raise ConfigError("no slice is named; write --on v6e, or --on v6e-64.")
        least = min(found, key=lambda on: (on.chips, on.num_slices))
        if self.max_chips is not None:
            refuse_too_many_chips(least, self.max_chips)
        raise ConfigError(f"{least} joins several slices; allow that (--multi-slice).")

    def slices(self) -> list[Slice]:
        """Every slice, or several of them, within `max_chips`."""
        found = [on for name in self.generations for on in _slices_of(name)]
        most = self.max_chips or math.inf
        several = self.multi_slice
        return [
            on
            for on in dict.fromkeys(found)
            if on.chips <= most and (several or on.num_slices == 1)
        ]


def _slices_of(name: str) -> Iterator[Slice]:
    """The slices a name stands for: a generation's, one by one and joined, or that one slice."""
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
        # Joining slices makes sense from whole pods or large blocks only.
        if one.chips >= min(256, max(s.chips for s in list_slices(chip.name))):
            for count in SLICE_COUNTS[1:]:
                yield Slice(chip, one.topology, count)


def named_slice(name: str) -> Slice | None:
    """The slice that a name such as "v6e-64" is of; None of a generation's name."""
    text = name.strip()
    whole = any(mark in text for mark in "-:") and not text.lower().startswith("tpu v")
    return Slice.parse(text) if whole else None


def refuse_too_many_chips(one: Slice, max_chips: int | None) -> None:
    """Raise where the smallest slice that was named has more chips than were allowed."""
    if max_chips is not None and one.chips > max_chips:
        raise ConfigError(
            f"{one}, the smallest slice to choose from, has {one.chips:,} chips, but max_chips is "
            f"{max_chips:,}; name a smaller slice, or allow more chips."
        )


def unknown_rate(chip: Chip) -> str:
    """Which rate that every plan needs the catalog does not have, and why; "" when it has all."""
    if chip.no_slices:
        return chip.no_slices
    for what, figure in (("HBM", chip.hbm_gbps), ("link", chip.ici_link_effective_gbps)):
        if figure.value is None:
            return f"its {what} bandwidth is not known: {figure.reason.rstrip('.')}"
    return ""


def refuse_unknown_rates(chip: Chip) -> None:
    """Raise where nothing can be said about a chip's speed."""
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
    """Whether a chip multiplies a precision at a rate of its own; every chip has that of bf16."""
    return precision == "bf16" or chip.multiplies(precision)


def usual_batches(sequence_length: int) -> tuple[int, ...]:
    """Powers of two and three times such, up to as many tokens whatever the length of an example.

    Short examples need more of them to fill a device with the same work; long ones may be split
    along `context`.
    """
    most = max(1, LARGEST_DEVICE_TOKENS * max(CONTEXTS) // sequence_length)
    powers = [2**power for power in range(most.bit_length())]
    return tuple(sorted(size for two in powers for size in (two, 3 * two) if size <= most))


@dataclass(frozen=True)
class Candidates:
    """Arrays, one entry a candidate; `meshes[mesh[i]]` is where candidate i runs.

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
        """Some of them."""
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
        """Slices of each."""
        return self.of_mesh([mesh.slice.num_slices for mesh in self.meshes])

    @cached_property
    def slices_sharing(self) -> np.ndarray:
        """Slices that hold one copy of the weights together."""
        joined = [one.joined_by == "fsdp" for one in self.meshes]
        return np.where(self.of_mesh(joined), self.num_slices, 1)

    @cached_property
    def chips(self) -> np.ndarray:
        """Chips of each, all slices together."""
        return self.of_mesh([mesh.slice.chips for mesh in self.meshes])

    @cached_property
    def batch_ways(self) -> np.ndarray:
        """Shares a batch is cut into."""
        sizes = self.sizes
        return sizes["data"] * sizes["fsdp"] * sizes["expert"] * self.num_slices

    @property
    def int8_moments(self) -> np.ndarray:
        """Whether the optimizer keeps its moments in eight bits."""
        return np.asarray([one.moment_dtype == "int8" for one in self.optimizers])[self.optimizer]

    @property
    def examples(self) -> np.ndarray:
        """Examples of a whole step."""
        return self.batch * self.microbatches * self.batch_ways

    def of_mesh(self, values: Sequence[float]) -> np.ndarray:
        """One value a mesh, spread over the candidates."""
        return np.asarray(values)[self.mesh]


def enumerate_candidates(
    shape: ModelShape,
    space: Space,
    *,
    sequence_length: int,
    max_batch_tokens: float,
    fixed_examples: int | None = None,
) -> Candidates:
    """All combinations whose step has at most `max_batch_tokens` tokens.

    With `fixed_examples` a step has exactly so many examples, however they are split.
    """
    shapes = shape.trained_shapes
    widest = max(state_bytes_per_parameter(one, shapes) for one in space.optimizers)
    meshes = tuple(
        mesh
        for on in space.slices()
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
    # A pipeline shorter of micro-batches than of stages mostly waits.
    filled = everything.microbatches >= everything.sizes["stage"]
    held = everything.batch * sequence_length / everything.sizes["context"]
    is_small = (held <= LARGEST_DEVICE_TOKENS) | (everything.batch == 1)
    if space.batches is not None or fixed_examples is not None:
        is_small = np.ones(len(everything), bool)  # as they were asked for
    return everything.take(np.flatnonzero((tokens <= max_batch_tokens) & filled & is_small))
