"""Which micro-batch every pipeline stage works on, slot by slot."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias, TypeVar, get_args

from jax import Array
from rich.console import Group
from rich.text import Text

from ...errors import TPUValidationError, did_you_mean
from ...plain_data import JsonObject
from ...shown import Shown

ScheduleName: TypeAlias = Literal["gpipe", "1f1b"]
Index = TypeVar("Index", int, Array)


def forward_microbatch(tick: Index, stage: Index) -> Index:
    """Return the micro-batch that `stage` sends forward in `tick`."""
    return tick - stage


def backward_microbatch(tick: Index, stage: Index, stages: int) -> Index:
    """Return the micro-batch `stage` sends backward in `tick` of 1F1B.

    The last stage starts the backward pass of a micro-batch in the tick of its arrival, and every
    stage before it is one tick later.
    """
    return tick - (2 * (stages - 1) - stage)


class SlotWork(NamedTuple):
    """One stage's work in one slot."""

    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class PipelineSchedule(Shown):
    """The table of a pipeline schedule, and its bubble and memory.

    Every device runs the same program, so a slot is forward for all stages or backward for all:
    "gpipe" runs all forward slots and then all backward ones; "1f1b" runs only forward slots until
    the last stage has work, then alternates, then only backward slots. Both idle equally; "1f1b"
    keeps the inputs of at most 2·stages-1 micro-batches, "gpipe" of all of them.
    """

    name: ScheduleName
    stages: int
    microbatches: int

    def __post_init__(self) -> None:
        known = get_args(ScheduleName)
        if self.name not in known:
            raise TPUValidationError(
                f"Pipeline schedule '{self.name}' is unknown; known are {', '.join(known)}."
                f"{did_you_mean(self.name, known)}"
            )
        if self.stages < 1 or self.microbatches < 1:
            raise TPUValidationError(
                f"A pipeline of {self.stages} stages and {self.microbatches} micro-batches has "
                "nothing to do; both must be at least 1."
            )

    @cached_property
    def table(self) -> tuple[tuple[SlotWork | None, ...], ...]:
        """`table[slot][stage]`: the work of a stage in a slot, or None when it idles."""
        last_tick = self.microbatches + self.stages - 2
        if self.name == "gpipe":
            forward = [self._slot("F", tick) for tick in range(last_tick + 1)]
            # Differentiation runs the forward ticks in reverse.
            backward = [
                tuple(work and SlotWork("B", work.microbatch) for work in slot)
                for slot in reversed(forward)
            ]
            return (*forward, *backward)
        slots: list[tuple[SlotWork | None, ...]] = []
        for tick in range(last_tick + self.stages):
            if tick <= last_tick:
                slots.append(self._slot("F", tick))
            if tick >= self.stages - 1:
                slots.append(self._slot("B", tick))
        return tuple(slots)

    @property
    def bubble_fraction(self) -> float:
        """The fraction of stage-slots in which a stage idles, counted in the table."""
        cells = [work for slot in self.table for work in slot]
        return cells.count(None) / len(cells)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches between their forward and backward pass, for every stage."""
        held = [0] * self.stages
        most = [0] * self.stages
        for slot in self.table:
            for stage, work in enumerate(slot):
                if work is not None:
                    held[stage] += 1 if work.kind == "F" else -1
                    most[stage] = max(most[stage], held[stage])
        return tuple(most)

    @property
    def buffers(self) -> int:
        """Micro-batch inputs per device; the most of any stage, because all run one program."""
        return max(self.in_flight)

    def draw(self) -> str:
        """Return the table as text, one line per stage."""
        width = len(str(self.microbatches - 1)) + 1
        rows: list[str] = []
        for stage in range(self.stages):
            cells = [str(slot[stage] or "·").ljust(width) for slot in self.table]
            rows.append(f"stage {stage}  {' '.join(cells).rstrip()}")
        return "\n".join(rows)

    def to_dict(self) -> JsonObject:
        """Return the schedule as plain data."""
        return {
            "name": self.name,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "slots": len(self.table),
            "bubble_fraction": self.bubble_fraction,
            "in_flight": list(self.in_flight),
            "table": [[work and str(work) for work in slot] for slot in self.table],
        }

    def __rich__(self) -> Group:
        drawing = Text(self.draw(), no_wrap=True, overflow="ellipsis")
        drawing.highlight_regex(r"F\d+", "green")
        drawing.highlight_regex(r"B\d+", "cyan")
        drawing.highlight_regex(r"·", "dim")
        summary = Text(
            f"{self.name}: {self.stages} stages, {self.microbatches} micro-batches, "
            f"{self.bubble_fraction:.1%} of the time idle (model), "
            f"{self.buffers} micro-batch inputs held a device"
        )
        return Group(summary, drawing)

    def _slot(self, kind: Literal["F", "B"], tick: int) -> tuple[SlotWork | None, ...]:
        def work(stage: int) -> SlotWork | None:
            if kind == "F":
                microbatch = forward_microbatch(tick, stage)
            else:
                microbatch = backward_microbatch(tick, stage, self.stages)
            return SlotWork(kind, microbatch) if 0 <= microbatch < self.microbatches else None

        return tuple(work(stage) for stage in range(self.stages))
