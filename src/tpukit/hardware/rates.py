"""What programs reach of a chip's stated figures, for the timeline and the planner alike.

`data/rates.toml` holds every number with its unit, what it is and how it was obtained. Each class
here is a section of that file; `figures()` gives the same numbers with their provenance.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar, Self, TypeVar

from ..errors import TPUValidationError
from .figure import Figure

EVERY_GENERATION = "default"


@dataclass(frozen=True, kw_only=True)
class _Section:
    """A section of the data file, read once for each generation."""

    section: ClassVar[str]

    @classmethod
    def of(cls, generation: str = EVERY_GENERATION) -> Self:
        """The numbers for chips of a generation, as `Chip.name` spells it."""
        return _load(cls, generation)

    @classmethod
    def figures(cls, generation: str = EVERY_GENERATION) -> dict[str, Figure]:
        """The same with unit, source and date.

        Raises:
            TPUValidationError: The data file and this class do not name the same numbers, or a
                number cites a source that the file does not describe.
        """
        entries = rates_file()[cls.section]
        differing = {field.name for field in fields(cls)} ^ set(entries)
        if differing:
            raise TPUValidationError(
                f"[{cls.section}] of rates.toml must hold exactly the fields of {cls.__name__}; "
                f"missing or unknown: {', '.join(sorted(differing))}."
            )
        return {name: _figure(entry, generation) for name, entry in entries.items()}


@dataclass(frozen=True, kw_only=True)
class ChipRates(_Section):
    """What one device of a generation reaches, and what its compiler does."""

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
    """What attention kernels reach on a generation."""

    section: ClassVar[str] = "attention"

    share_64: float | None
    share_128: float | None
    share_256: float | None
    filling_head: float
    backward_over_forward: float
    jax_over_tokamax_forward: float
    jax_over_tokamax_backward: float

    def share(self, head_dim: float, *, of_products: float) -> float:
        """Share of the matrix peak that attention reaches with heads of a size.

        What a score takes is measured at three sizes and grows along straight lines between them:
        where softmax decides, wider heads take hardly longer. Smaller heads take as long as the
        smallest, wider ones reach the share of the widest.

        Args:
            head_dim: Channels of a head; where queries and values differ, the mean of both.
            of_products: Share that other products reach, for generations nobody measured.
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
    """What compiled steps do that arithmetic on a model's dimensions cannot count."""

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
    """What is alive at once in compiled steps."""

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
    """What servers reach that decode from a cache."""

    section: ClassVar[str] = "serving"

    cache_share: float


@dataclass(frozen=True, kw_only=True)
class Accuracy(_Section):
    """How far the planner's arithmetic is off; `scored_steps` has the same of compiled steps."""

    section: ClassVar[str] = "accuracy"

    close_steps: float


SECTIONS: tuple[type[_Section], ...] = (
    *(ChipRates, AttentionRates, StepRates, MemoryRates, ServingRates, Accuracy),
)

S = TypeVar("S", bound=_Section)


@cache
def _load(section: type[S], generation: str) -> S:
    values: dict[str, Any] = {
        name: figure.value for name, figure in section.figures(generation).items()
    }
    return section(**values)


@cache
def rates_file() -> dict[str, Any]:
    """The content of `data/rates.toml`."""
    return tomllib.loads((files("tpukit.hardware") / "data" / "rates.toml").read_text("utf-8"))


def _figure(entry: Mapping[str, Any], generation: str) -> Figure:
    chosen = entry.get(generation, entry[EVERY_GENERATION])
    about = {"note": "; ".join(filter(None, (entry["what"], chosen.get("note", ""))))}
    return Figure.cited({**chosen, **about}, entry["unit"], rates_file()["sources"])
