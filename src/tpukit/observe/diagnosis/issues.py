"""Which figures of a step are a problem, what each costs, and what to do about it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ...compiler.compiled import CompiledStep
from ...hardware import Figure
from ...hardware.figure import format_quantity
from ...shown import Shown
from .evidence import Bottlenecks
from .input_rate import InputRate

# From these shares of a step on, something is worth a word.
COMMUNICATION, MEMORY, HOST, OVERHEAD = 0.10, 0.35, 0.05, 0.10
PADDING = 0.10  # of HBM
ROOM_LEFT = 0.5  # of HBM, above which a larger batch is the first thing to try
COMPILE_STEPS = 1000  # a compile as long as this many steps is worth keeping


@dataclass(frozen=True)
class PerformanceIssue(Shown):
    """One thing that costs time.

    Attributes:
        share: Of the step, for ordering; 1 for what stops it altogether.
    """

    problem: str
    impact: str
    solution: str
    share: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def bottleneck_issues(shares: Bottlenecks, step_time_s: float) -> Iterator[PerformanceIssue]:
    """What the shares of a predicted step say."""

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
            "Raise the batch or the model's width, and let one scan hold all layers.",
            shares.overhead,
        )


def memory_issues(compiled: CompiledStep) -> Iterator[PerformanceIssue]:
    """What the compiler's memory report says."""
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
            f"{format_quantity(padding, 'B')} of HBM hold nothing (compiler)",
            "Make the last two dimensions of large arrays multiples of 8 and 128.",
            padding / memory.total_bytes,
        )
    left = memory.headroom_bytes
    if left is not None and left > ROOM_LEFT * (memory.usable_bytes or left):
        yield PerformanceIssue(
            "Suboptimal batch size",
            f"{format_quantity(left, 'B')} of HBM are not used (compiler)",
            "Raise the batch, or recompute less (--remat), as far as tpukit check says it fits.",
        )


def input_issues(rate: InputRate, examples: int, step_time_s: Figure) -> Iterator[PerformanceIssue]:
    """Whether the data loader keeps up with the step."""
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
    """Whether compiling is long beside the steps."""
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
    """Whether the target is met, and whether it can be."""
    if target_tflops is None:
        return
    if peak.value is not None and target_tflops > peak.value:
        yield PerformanceIssue(
            "Target above the peak",
            f"{target_tflops:,.0f} TFLOP/s were asked for, and the peak is {peak.value:,.0f} "
            f"({peak.origin})",
            "Lower the target, or choose a larger slice: no program passes the peak.",
        )
    if achieved.value is not None and achieved.value < target_tflops:
        missing = 1 - achieved.value / target_tflops
        yield PerformanceIssue(
            "Below target",
            f"{achieved.value:,.4g} of {target_tflops:,.4g} TFLOP/s ({achieved.origin}), "
            f"{missing:.0%} short",
            "Work on the largest share first: see the other issues in order.",
        )
