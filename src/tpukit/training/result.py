"""The result of training: losses, times, checkpoint, and where the time went."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rich.table import Table

from ..hardware import Figure
from ..records.ledger import Goodput
from ..shown import Shown
from .evaluation import Evaluation
from .recompile import ArgumentChange
from .throughput import Throughput

Stopped = Literal["done", "preempted", "data ended"]


@dataclass(frozen=True, kw_only=True)
class TrainingResult(Shown):
    """The result of one call of `train()`.

    Attributes:
        steps: Steps of the run so far, earlier calls included.
        first_step: The first step of this call; `losses` and `step_times_s` start there.
        losses: The loss of each step, penalties and z-loss included.
        step_times_s: Seconds since the previous step's completion; waiting for input included.
        stopped: "done", "preempted" (by a signal: run again to continue) or "data ended".
        checkpoint_path: The newest checkpoint, or None when none was saved.
        resumed_from: The step this call resumed from, or None if it began a new run.
        compile_s: Seconds of tracing and compiling the step.
        input_wait_s: Seconds that the host waited for batches; the part in which devices were idle
            is `goodput.spent_s["input_stall"]`.
        predicted_step_s: The prediction of an earlier `tpukit check` of the same job.
        rollbacks: How often training went back to a checkpoint.
        failed_saves: Steps whose checkpoint could not be written, with the reason.
    """

    steps: int
    first_step: int
    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    stopped: Stopped
    run_dir: str
    checkpoint_path: str | None
    resumed_from: int | None
    compile_s: float
    compiled_from_cache: bool
    input_wait_s: float
    goodput: Goodput
    throughput: Throughput
    predicted_step_s: Figure
    evaluations: tuple[Evaluation, ...] = ()
    recompiles: tuple[ArgumentChange, ...] = ()
    rollbacks: int = 0
    failed_saves: Mapping[int, str] = field(default_factory=dict[int, str])

    @property
    def loss(self) -> float | None:
        """The loss of the last step, or None if no step was left to take."""
        return self.losses[-1] if self.losses else None

    @property
    def step_time_s(self) -> Figure:
        """The median step time; the first step is left out if there are others."""
        times = self.step_times_s[1:] or self.step_times_s
        if not times:
            return Figure.missing("s", "no step was taken")
        source = f"median of {len(times)} steps on {self.throughput.devices} devices"
        return Figure(statistics.median(times), "s", "measured", source)

    @property
    def mfu(self) -> Figure:
        """Model FLOP utilization of the median step; its source is the convention."""
        step = self.step_time_s
        value = None if step.value is None else self.throughput.mfu(step.value)
        if value is None:
            return Figure.missing("", step.reason or self.throughput.no_mfu)
        figure = Figure.derived(value, "", inputs=(step, self.throughput.peak_tflops))
        return replace(figure, source=self.throughput.mfu_convention)

    @property
    def tokens_per_s_per_chip(self) -> Figure:
        """Tokens per second and chip in the median step."""
        step = self.step_time_s
        value = None if step.value is None else self.throughput.tokens_per_s_per_chip(step.value)
        if value is None:
            return Figure.missing(
                "tokens/s/chip", step.reason or "the batch has no token sequences"
            )
        return Figure.derived(value, "tokens/s/chip", inputs=(step,))

    @property
    def examples_per_s_per_chip(self) -> Figure:
        """Examples per second and chip in the median step; for models that read no tokens."""
        step = self.step_time_s
        value = None if step.value is None else self.throughput.examples_per_s_per_chip(step.value)
        if value is None:
            return Figure.missing("examples/s/chip", step.reason or "examples are made of tokens")
        return Figure.derived(value, "examples/s/chip", inputs=(step,))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "steps": self.steps,
            "first_step": self.first_step,
            "loss": self.loss,
            "losses": list(self.losses),
            "step_times_s": list(self.step_times_s),
            "step_time_s": self.step_time_s.to_dict(),
            "predicted_step_s": self.predicted_step_s.to_dict(),
            "tokens_per_s_per_chip": self.tokens_per_s_per_chip.to_dict(),
            "examples_per_s_per_chip": self.examples_per_s_per_chip.to_dict(),
            "mfu": self.mfu.to_dict(),
            "stopped": self.stopped,
            "run_dir": self.run_dir,
            "checkpoint_path": self.checkpoint_path,
            "resumed_from": self.resumed_from,
            "compile_s": self.compile_s,
            "compiled_from_cache": self.compiled_from_cache,
            "input_wait_s": self.input_wait_s,
            "evaluations": [evaluation.to_dict() for evaluation in self.evaluations],
            "recompiles": [change.to_dict() for change in self.recompiles],
            "rollbacks": self.rollbacks,
            "failed_saves": {str(step): reason for step, reason in self.failed_saves.items()},
            "throughput": self.throughput.to_dict(),
            **self.goodput.to_dict(),
        }

    def __rich__(self) -> Table:
        table = Table(title=f"training {self.stopped}: {self.steps} steps", show_header=False)
        table.title_justify = "left"
        loss = "–" if self.loss is None else f"{self.losses[0]:.4f} → {self.loss:.4f}"
        table.add_row("loss", loss)
        for evaluation in self.evaluations[-1:]:
            table.add_row("evaluation", str(evaluation))
        table.add_row("step", f"{self.step_time_s}; predicted {self.predicted_step_s}")
        has_tokens = self.throughput.examples_per_step is None
        speed = self.tokens_per_s_per_chip if has_tokens else self.examples_per_s_per_chip
        table.add_row("speed", str(speed))
        mfu = self.mfu
        shown = f"{mfu.value:.1%} ({mfu.source})" if mfu.value is not None else str(mfu)
        table.add_row("MFU", shown)
        cached = ", from the cache" if self.compiled_from_cache else ""
        table.add_row("compile", f"{self.compile_s:.1f} s (measured{cached})")
        table.add_row("goodput", f"{self.goodput} (measured)")
        if self.rollbacks:
            table.add_row("rollbacks", str(self.rollbacks))
        for change in self.recompiles:
            table.add_row("recompiled", str(change))
        if self.failed_saves:
            steps = ", ".join(map(str, self.failed_saves))
            table.add_row("not saved", f"step {steps}; the checkpoint below is the last good one")
        table.add_row("checkpoint", self.checkpoint_path or "none was saved")
        table.add_row("run", self.run_dir)
        return table
