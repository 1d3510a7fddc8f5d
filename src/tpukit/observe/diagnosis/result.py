"""The result of a diagnosis: figures, shares by bottleneck, issues and their solutions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...compiler.compiled import CompiledStep
from ...hardware import Figure
from ...hardware.figure import format_quantity
from ...shown import MappedResult, Renderable, Shown
from .evidence import CAUSES_BY_KIND, Bottlenecks, InputRate

# An issue is reported from these shares of a step on.
COMMUNICATION, MEMORY, HOST, OVERHEAD = 0.10, 0.35, 0.05, 0.10
PADDING = 0.10  # of HBM
ROOM_LEFT = 0.5  # of HBM, above which a larger batch is the first thing to try
COMPILE_STEPS = 1000  # a compile as long as this many steps is worth keeping


@dataclass(frozen=True)
class PerformanceIssue(Shown):
    """One thing that costs time.

    Attributes:
        share: Share of the step, for ordering; 1 for an issue that stops the step.
    """

    problem: str
    impact: str
    solution: str
    share: float = 0.0


def bottleneck_issues(shares: Bottlenecks, step_time_s: float) -> Iterator[PerformanceIssue]:
    """Yield the issues in the shares of a predicted step."""

    def cost(share: float) -> str:
        return f"{share:.0%} of the step, {share * step_time_s:.3g} s (model)"

    if shares.communication > COMMUNICATION:
        yield PerformanceIssue(
            "Communication overhead",
            f"chips wait for each other for {cost(shares.communication)}",
            "Raise the batch per device, accumulate gradients over microbatches, try another mesh "
            "(tpukit check --mesh), or search options that overlap it (tpukit flags tune).",
            shares.communication,
        )
    if shares.memory > MEMORY:
        yield PerformanceIssue(
            "Memory bandwidth",
            f"HBM bounds {cost(shares.memory)}",
            "Raise the batch per device, keep activations in bfloat16, fuse or use kernels for "
            "attention and cross-entropy, and recompute less.",
            shares.memory,
        )
    if shares.host > HOST:
        yield PerformanceIssue(
            "Host offload",
            f"the chip waits for host memory for {cost(shares.host)}",
            "Offload fewer names in the remat policy, or recompute them instead (--remat full).",
            shares.host,
        )
    if shares.overhead > OVERHEAD:
        yield PerformanceIssue(
            "Many small operations",
            f"starting them takes {cost(shares.overhead)}",
            "Raise the batch or the model's width, and run all layers in one scan.",
            shares.overhead,
        )


def memory_issues(compiled: CompiledStep) -> Iterator[PerformanceIssue]:
    """Yield the issues in the compiler's memory report."""
    memory = compiled.memory
    if not memory.fits:
        yield PerformanceIssue(
            "Does not fit",
            memory.verdict,
            "Let the compiler verify what would make it fit: tpukit check … --fix.",
            1.0,
        )
        return
    padding = memory.purposes.get("padding", 0)
    if padding > PADDING * memory.total_bytes:
        yield PerformanceIssue(
            "Padding",
            f"{format_quantity(padding, 'B')} of HBM are padding (compiler)",
            "Make the last two dimensions of large arrays multiples of 8 and 128.",
            padding / memory.total_bytes,
        )
    left = memory.headroom_bytes
    if left is not None and left > ROOM_LEFT * (memory.usable_bytes or left):
        yield PerformanceIssue(
            "Suboptimal batch size",
            f"{format_quantity(left, 'B')} of HBM are not used (compiler)",
            "Raise the batch, or recompute less (--remat), as far as it fits by tpukit check.",
        )


def input_issues(rate: InputRate, examples: int, step_time_s: Figure) -> Iterator[PerformanceIssue]:
    """Yield an issue if the data loader is slower than the step."""
    if rate.samples_per_s is None or not step_time_s.value:
        return
    needed = examples / step_time_s.value
    if rate.samples_per_s < needed:
        share = 1 - rate.samples_per_s / needed
        yield PerformanceIssue(
            "Data loading bottleneck",
            f"it delivers {rate.samples_per_s:,.4g} samples/s (measured) and the step takes "
            f"{needed:,.4g} ({step_time_s.origin}): chips idle {share:.0%} of the time",
            "Use more workers, prefetch to the device, and move decoding out of the loop.",
            share,
        )


def compile_issues(compile_s: Figure, step_time_s: Figure) -> Iterator[PerformanceIssue]:
    """Yield an issue if compiling takes as long as many steps."""
    if not compile_s.value or not step_time_s.value or compile_s.origin != "measured":
        return
    steps = compile_s.value / step_time_s.value
    if steps > COMPILE_STEPS:
        yield PerformanceIssue(
            "Compilation overhead",
            f"compiling takes {compile_s.value:.3g} s, as long as {steps:,.0f} steps (measured)",
            "Keep compiled programs: set jax_compilation_cache_dir, or save_executable; and keep "
            "shapes the same from step to step.",
        )


def target_issues(
    achieved: Figure, target_tflops: float | None, peak: Figure
) -> Iterator[PerformanceIssue]:
    """Yield issues if the target is not reached, or is above the peak."""
    if target_tflops is None:
        return
    if peak.value is not None and target_tflops > peak.value:
        yield PerformanceIssue(
            "Target above the peak",
            f"{target_tflops:,.0f} TFLOP/s is the target, but the peak is {peak.value:,.0f} "
            f"({peak.origin})",
            "Lower the target, or choose a larger slice: no program exceeds the peak.",
        )
    if achieved.value is not None and achieved.value < target_tflops:
        missing = 1 - achieved.value / target_tflops
        yield PerformanceIssue(
            "Below target",
            f"{achieved.value:,.4g} of {target_tflops:,.4g} TFLOP/s ({achieved.origin}), "
            f"{missing:.0%} short",
            "Work on the largest share first: see the other issues in order.",
        )


@dataclass(frozen=True, kw_only=True)
class PerformanceDiagnosis(MappedResult):
    """The result of a diagnosis.

    Reads like a mapping: `diagnosis["issues"]`, `diagnosis["compute_bound"]`.

    Attributes:
        where: The slice, or the devices of this process.
        step_time_s: Measured where steps were run, else predicted.
        predicted_step_s: From the timeline of an offline compile.
        achieved_tflops: Over all devices; its source names the FLOPs that are counted.
        target_tflops: The desired TFLOP/s over all devices.
        bottlenecks: None with the reason in `no_bottlenecks`.
        issues: The costliest first.
    """

    where: str
    step_time_s: Figure
    predicted_step_s: Figure
    compile_s: Figure
    achieved_tflops: Figure
    target_tflops: float | None
    peak_tflops: Figure
    bottlenecks: Bottlenecks | None
    no_bottlenecks: str
    input_rate: InputRate | None
    issues: tuple[PerformanceIssue, ...]
    notes: tuple[str, ...] = ()
    _facts = (
        "where step_time_s predicted_step_s compile_s achieved_tflops target_tflops peak_tflops "
        "**bounds bottleneck_origin no_bottlenecks input=input_rate issues recommendations "
        "notes"
    )

    @property
    def recommendations(self) -> list[str]:
        """The solutions, the costliest issue first."""
        return [issue.solution for issue in self.issues]

    @property
    def bounds(self) -> dict[str, float | None]:
        """Shares of the step as they are named in the JSON, such as "compute_bound"."""
        shares = self.bottlenecks
        return {f"{kind}_bound": shares and getattr(shares, kind) for kind in CAUSES_BY_KIND}

    @property
    def bottleneck_origin(self) -> str | None:
        """The origin of the bottlenecks; None where they are unknown."""
        return "model" if self.bottlenecks else None

    def __rich__(self) -> Renderable:
        """Return figures, shares as bars, then the issues."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        figures = Table(box=None, show_header=False, pad_edge=False)
        for name, figure in (
            ("step", self.step_time_s),
            ("predicted step", self.predicted_step_s),
            ("compile", self.compile_s),
            ("achieved", self.achieved_tflops),
            ("peak", self.peak_tflops),
        ):
            if figure.value is not None:
                figures.add_row(name, f"{figure.value:.4g} {figure.unit}", figure.origin)
        if self.input_rate is not None and self.input_rate.samples_per_s is not None:
            rate = f"{self.input_rate.samples_per_s:,.0f} samples/s"
            figures.add_row("input alone", rate, "measured")
        shares = Table(box=None, show_header=False, pad_edge=False)
        for kind in CAUSES_BY_KIND if self.bottlenecks else ():
            share = getattr(self.bottlenecks, kind)
            shares.add_row(f"{kind} bound", f"{share:6.1%}", "█" * round(share * 40), "model")
        parts: list[Any] = [Text(f"performance on {self.where}", style="bold"), figures, shares]
        if self.no_bottlenecks:
            parts.append(Text(f"no shares: {self.no_bottlenecks}", style="dim"))
        for issue in self.issues:
            parts.append(Text.assemble((issue.problem, "yellow"), f": {issue.impact}"))
            parts.append(Text(f"  {issue.solution}"))
        if not self.issues:
            parts.append(Text("no issue found", style="green"))
        return Group(*parts, *[Text(f"note: {note}", style="dim") for note in self.notes])
