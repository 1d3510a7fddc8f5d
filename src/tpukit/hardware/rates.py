"""The share of a chip's stated figures that programs reach, for the timeline and the planner.

`data/rates.toml` has every number with its unit, its meaning, its source and its default. Values of
one generation are in that chip's own file. Each class here is a section of `rates.toml`;
`figures()` returns the same numbers with their provenance.
"""

import json
import math
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from importlib.resources import files
from typing import ClassVar, Self, TypeVar

from ..errors import TPUValidationError
from ..plain_data import JsonMapping, JsonObject
from .catalog import list_chips
from .figure import Figure

EVERY_GENERATION = "default"


@dataclass(frozen=True, kw_only=True)
class _Section:
    """A section of the data file, read once per generation."""

    section: ClassVar[str]

    @classmethod
    def of(cls, generation: str = EVERY_GENERATION) -> Self:
        """Return the numbers for a generation, given by its `Chip.name`."""
        return _load(cls, generation)

    @classmethod
    def figures(cls, generation: str = EVERY_GENERATION) -> dict[str, Figure]:
        """Return the same numbers with unit, source and date.

        Raises:
            TPUValidationError: The data file and this class do not name the same numbers, or a
                number cites a source that the file does not describe.
        """
        entries = rates_file()[cls.section]
        differing = {field.name for field in fields(cls)} ^ set(entries)
        if differing:
            raise TPUValidationError(
                f"[{cls.section}] of rates.toml must have exactly the fields of {cls.__name__}; "
                f"missing or unknown: {', '.join(sorted(differing))}."
            )
        return {name: _figure(entry, generation) for name, entry in entries.items()}


@dataclass(frozen=True, kw_only=True)
class ChipRates(_Section):
    """Efficiencies of one device, and what the compiler does on its generation."""

    section: ClassVar[str] = "chip"

    op_time_in_a_step: float
    wait_per_doubling: float
    matrix_efficiency: float
    streamed_matrix_efficiency: float
    grouped_efficiency: float
    resident_mib: float
    int8_over_bf16: float
    int8_gain_over_rows: float
    hbm_efficiency: float
    vmem_over_hbm: float
    op_overhead_s: float
    hop_latency_s: float
    gathers_along_whole_torus: float
    dcn_share: float
    int8_moment_bytes: float
    rounds_weights_first: float


@dataclass(frozen=True, kw_only=True)
class AttentionRates(_Section):
    """Efficiencies of attention kernels on a generation."""

    section: ClassVar[str] = "attention"

    share_64: float | None
    share_128: float | None
    share_256: float | None
    filling_head: float
    backward_over_forward: float
    jax_over_tokamax_forward: float
    jax_over_tokamax_backward: float

    def share(self, head_dim: float, *, of_products: float) -> float:
        """Return the share of the matrix peak that attention reaches with heads of a size.

        The time per score is measured at three head sizes and interpolated linearly between them,
        because wider heads hardly take longer where softmax is the bottleneck. Heads below the
        smallest size take as long as it; heads above the largest reach its share.

        Args:
            head_dim: Channels per head; the mean of both where queries and values differ.
            of_products: Share that other matmuls reach, for generations without measurements.
        """
        known = {64: self.share_64, 128: self.share_128, 256: self.share_256}
        measured = {size: share for size, share in known.items() if share is not None}
        if len(measured) < len(known):
            measured = {int(self.filling_head): of_products}
        sizes = list(measured)
        if head_dim >= sizes[-1]:
            return measured[sizes[-1]]
        costs = [size / share for size, share in measured.items()]
        for small, large, low, high in zip(sizes, sizes[1:], costs, costs[1:], strict=False):
            if small <= head_dim <= large:
                return head_dim / (low + (high - low) * (head_dim - small) / (large - small))
        return head_dim / costs[0]


@dataclass(frozen=True, kw_only=True)
class StepRates(_Section):
    """Costs of compiled steps that a model's dimensions alone do not give."""

    section: ClassVar[str] = "step"

    ours_over_splash_forward: float
    ours_over_splash_backward: float
    plain_forward_bytes: float
    plain_backward_bytes: float
    ring_forward_bytes: float
    ring_backward_bytes: float
    ring_waited: float
    routed_moves: float
    rounding_beside_products: float
    ops_per_layer: float


@dataclass(frozen=True, kw_only=True)
class MemoryRates(_Section):
    """Buffers that are alive at the same time in compiled steps."""

    section: ClassVar[str] = "memory"

    working_hidden: float
    working_heads: float
    working_model: float
    kept_model: float
    gathered_matrices: float
    host_headroom: float
    serving_headroom: float


@dataclass(frozen=True, kw_only=True)
class ServingRates(_Section):
    """Efficiencies of servers that decode from a cache."""

    section: ClassVar[str] = "serving"

    cache_share: float


@dataclass(frozen=True, kw_only=True)
class Accuracy(_Section):
    """Error of the planner's arithmetic; `scored_steps` has the error of compiled steps."""

    section: ClassVar[str] = "accuracy"

    close_steps: float


SECTIONS: tuple[type[_Section], ...] = (
    *(ChipRates, AttentionRates, StepRates, MemoryRates, ServingRates, Accuracy),
)

S = TypeVar("S", bound=_Section)


@cache
def _load(section: type[S], generation: str) -> S:
    values: JsonObject = {
        name: figure.value for name, figure in section.figures(generation).items()
    }
    return section(**values)


@cache
def rates_file() -> JsonObject:
    """Return `data/rates.toml`, with the values from each chip's file under the chip's name."""
    text = (files("tpukit.hardware") / "data" / "rates.toml").read_text("utf-8")
    content: JsonObject = tomllib.loads(text)
    for chip in list_chips():
        for section, values in chip.fitted_rates.items():
            for name, value in values.items():
                if section == "sources":
                    content[section].setdefault(name, value)
                elif name in content[section]:
                    content[section][name][chip.name] = value
                else:
                    raise TPUValidationError(
                        f"The chip file of {chip.name} has an unknown rate {section}.{name}; the "
                        f"section has {', '.join(content[section])}."
                    )
    return content


def _figure(entry: JsonMapping, generation: str) -> Figure:
    chosen = entry.get(generation, entry[EVERY_GENERATION])
    about = {"note": "; ".join(filter(None, (entry["what"], chosen.get("note", ""))))}
    return Figure.cited({**chosen, **about}, entry["unit"], rates_file()["sources"])


TAIL = 0.05  # of steps beyond the band on each side: nine of ten are expected inside


@dataclass(frozen=True)
class ScoredStep:
    """One published step.

    Attributes:
        source: Where it was published; rows of one log or table have the same source.
        predicted_s: Prediction with the constants of this release.
        held_out_s: Prediction with constants fitted without its source and generation.
        left_out: Why the score leaves it out, or "".
        date: When it was predicted.
    """

    name: str
    source: str
    chip: str
    published_s: float
    predicted_s: float
    held_out_s: float
    left_out: str = ""
    date: str = ""

    @property
    def ratio(self) -> float:
        """The published time over the held-out prediction."""
        return self.published_s / self.held_out_s

    @property
    def error(self) -> float:
        """Error of the held-out prediction, as a share of the published time."""
        return abs(self.held_out_s / self.published_s - 1)


@dataclass(frozen=True)
class ScoredSteps:
    """The result of the last scoring.

    Attributes:
        versions: Versions of the compiler that predicted the steps.
        steps: Every predicted step, including those left out of the score.
    """

    versions: str
    steps: tuple[ScoredStep, ...]

    @classmethod
    def shipped(cls) -> "ScoredSteps":
        """Return the scoring of this release."""
        return _shipped()

    @classmethod
    def from_dict(cls, data: JsonObject) -> "ScoredSteps":
        """Read the data of `to_dict`."""
        steps = tuple(ScoredStep(**step) for step in data["steps"])
        return cls(data["versions"], steps)

    def to_dict(self) -> JsonObject:
        """Return the scoring as plain data."""
        steps = [dict(vars(step)) for step in self.steps]
        return {"versions": self.versions, "steps": steps}

    def updated_by(self, newer: "ScoredSteps") -> "ScoredSteps":
        """Return this scoring with the steps of another one; new steps come last."""
        steps = {step.name: step for step in (*self.steps, *newer.steps)}
        return ScoredSteps(newer.versions, tuple(steps.values()))

    @property
    def date(self) -> str:
        """Date of the latest prediction."""
        return max(step.date for step in self.steps)

    @property
    def counted(self) -> tuple[ScoredStep, ...]:
        """The steps that the score counts."""
        return tuple(step for step in self.steps if not step.left_out)

    @cached_property
    def rows_by_source(self) -> dict[str, int]:
        """Number of steps per source, the largest first."""
        return dict(Counter(step.source for step in self.counted).most_common())

    @cached_property
    def band(self) -> "Band":
        """The band in which a step is expected, from all published steps."""
        return Band.around(self.counted)

    @cached_property
    def covered(self) -> int:
        """Number of steps inside a band that was computed without their source."""
        count = 0
        for source in self.rows_by_source:
            own = [step for step in self.counted if step.source == source]
            band = Band.around([step for step in self.counted if step.source != source])
            count += sum(band.holds(step) for step in own)
        return count

    @property
    def coverage_text(self) -> str:
        """The coverage as one clause of text."""
        rows = len(self.counted)
        return f"{self.covered} of {rows} published steps lay in one made without their source"


@dataclass(frozen=True)
class Band:
    """Shares of the predicted time by which a step may be shorter or longer."""

    below: float
    above: float

    @classmethod
    def around(cls, steps: Sequence[ScoredStep]) -> "Band":
        """Return the band that leaves out `TAIL` of the steps on each side, in whole percent."""
        ratios = sorted(step.ratio for step in steps)
        beyond = max(0, math.floor(TAIL * (len(ratios) + 1)) - 1)
        inside = ratios[beyond : len(ratios) - beyond]
        return cls(
            below=math.ceil(100 * (1 - inside[0])) / 100,
            above=math.ceil(100 * (inside[-1] - 1)) / 100,
        )

    def holds(self, step: ScoredStep) -> bool:
        """Whether a step is inside the band."""
        return 1 - self.below <= step.ratio <= 1 + self.above


@cache
def _shipped() -> ScoredSteps:
    text = files("tpukit.hardware").joinpath("data/scored_steps.json").read_text()
    return ScoredSteps.from_dict(json.loads(text))
