"""The predicted step: its duration, the causes, and the uncertainty."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...hardware import Figure, Slice, mfu_convention, model_flop_utilization, peak_of_products
from ...hardware.catalog import dcn_rate
from ...hardware.formats import PeakName
from ...hardware.rates import ScoredSteps
from ...hardware.utilization import COUNTED_BY_MODEL
from ...plain_data import JsonObject
from ...shown import Renderable, Shown
from ..bundles import CallTrace
from ..hlo import HloModule
from ..program_flops import KernelCounter, program_flops
from .kernels import StepKernelTimer
from .machine import Machine
from .network import Coordinate, Network, waiting_share
from .simulate import CAUSES, KernelTimer, Simulation, TrackSpan

_MEANING = {
    "matrix": "bound by the matrix unit",
    "hbm": "bound by HBM",
    "vector": "bound by VMEM and the vector unit",
    "kernel": "Pallas kernels",
    "ici": "waiting for chips of the slice",
    "dcn": "waiting for other slices",
    "host": "waiting for host memory",
    "overhead": "starting ops",
}


@dataclass(frozen=True)
class OpTime:
    """One op's share of the step."""

    name: str
    cause: str
    seconds: float
    times: int
    flops: float
    bytes: float
    op_name: str

    def to_dict(self) -> JsonObject:
        """Return the op as plain data."""
        return dict(vars(self))


@dataclass(frozen=True)
class StepPrediction(Shown):
    """A step's predicted time with its breakdown; every figure has origin `model`.

    Attributes:
        step_time_s: The most likely time.
        low_s: Nine of ten steps are expected to take at least this long.
        high_s: Nine of ten steps are expected to take at most this long.
        seconds_by_cause: Where the time goes; the parts add up to the step.
        transfer_s: Total duration of asynchronous transfers by kind, hidden or not.
        hardware_flops: FLOPs of one device, including kernels and recomputation.
        spans: The ops with their times, for a timeline; a loop's body appears once.
        caveats: Parts that the model does not cover.
        product_formats: Number formats of its matmul operands.
        examples_per_step: Examples in a batch that does not consist of tokens; else None.
        flops_counted: How `model_flops` were counted.
    """

    slice: Slice
    step_time_s: float
    low_s: float
    high_s: float
    seconds_by_cause: dict[str, float]
    transfer_s: dict[str, float]
    hardware_flops: Figure
    spans: tuple[TrackSpan, ...] = field(repr=False)
    caveats: tuple[str, ...] = ()
    tokens_per_step: int | None = None
    model_flops: float | None = None
    product_formats: frozenset[str] = frozenset()
    examples_per_step: int | None = None
    flops_counted: str = COUNTED_BY_MODEL

    @property
    def tokens_per_s_per_chip(self) -> float | None:
        """Throughput, if the batch consists of tokens."""
        if self.tokens_per_step is None:
            return None
        return self.tokens_per_step / self.step_time_s / self.slice.chips

    @property
    def examples_per_s_per_chip(self) -> float | None:
        """Throughput, if the batch does not consist of tokens."""
        if self.examples_per_step is None:
            return None
        return self.examples_per_step / self.step_time_s / self.slice.chips

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization; `mfu_convention` describes how FLOPs are counted."""
        peak = self.slice.peak_tflops(self.mfu_peak).value
        return model_flop_utilization(self.model_flops, self.step_time_s, peak)

    @property
    def mfu_peak(self) -> PeakName:
        """The peak that MFU is a share of."""
        return peak_of_products(self.slice.chip, self.product_formats)

    def top_ops(self, most: int = 10) -> list[OpTime]:
        """Return the ops with the most core time, the heaviest first."""
        heaviest = sorted(
            (span for span in self.spans if span.track == "core" and span.cause != "loop"),
            key=lambda span: -span.duration_s * span.times,
        )
        return [
            OpTime(
                span.name,
                span.cause,
                span.duration_s * span.times,
                span.times,
                span.flops * span.times,
                span.bytes * span.times,
                span.op_name,
            )
            for span in heaviest[:most]
        ]

    def to_dict(self) -> JsonObject:
        """Return every figure as plain data; spans are only in the trace file."""
        return {
            "origin": "model",
            "step_time_s": self.step_time_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "band_coverage": ScoredSteps.shipped().coverage_text,
            "seconds_by_cause": {cause: self.seconds_by_cause.get(cause, 0.0) for cause in CAUSES},
            "transfer_s": self.transfer_s,
            "tokens_per_s_per_chip": self.tokens_per_s_per_chip,
            "examples_per_s_per_chip": self.examples_per_s_per_chip,
            "mfu": self.mfu,
            "mfu_convention": mfu_convention(self.mfu_peak, self.flops_counted),
            "hardware_flops_per_device": self.hardware_flops.to_dict(),
            "top_ops": [op.to_dict() for op in self.top_ops()],
            "caveats": list(self.caveats),
        }

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        line = f"step {self.step_time_s:.4g} s ({self.low_s:.3g} to {self.high_s:.3g})"
        if self.tokens_per_s_per_chip is not None:
            line += f", {self.tokens_per_s_per_chip:,.0f} tokens/s/chip"
        if self.examples_per_s_per_chip is not None:
            line += f", {self.examples_per_s_per_chip:,.0f} examples/s/chip"
        if self.mfu is not None:
            line += f", MFU {self.mfu:.1%} of {self.mfu_peak} peak"
        shares = Table(box=None, show_header=False, pad_edge=False)
        for cause in CAUSES:
            seconds = self.seconds_by_cause.get(cause, 0.0)
            share = seconds / self.step_time_s if self.step_time_s else 0.0
            if share >= 0.001:
                bar = "█" * round(share * 40) or "▏"
                shares.add_row(_MEANING[cause], f"{seconds:.4g} s", f"{share:6.1%}", bar)
        ops = Table("op", "bound by", "seconds", "times", "from", box=None, pad_edge=False)
        for op in self.top_ops(6):
            source = op.op_name.split("/")[-1]
            ops.add_row(op.name, op.cause, f"{op.seconds:.4g}", str(op.times), source)
        band = Text(f"the band: {ScoredSteps.shipped().coverage_text}", style="dim")
        parts: list[Any] = [Text(line + "  [model]", style="bold"), band, shares, ops]
        parts += [Text(f"note: {caveat}", style="yellow") for caveat in self.caveats]
        return Group(*parts)


def predict_step(
    module: HloModule,
    target: Slice,
    *,
    coordinates: Sequence[Coordinate],
    slice_of_device: Sequence[int],
    machine: Machine | None = None,
    kernel_timer: KernelTimer | None = None,
    kernel_traces: Mapping[str, CallTrace] | None = None,
    tokens_per_step: int | None = None,
    model_flops: float | None = None,
) -> StepPrediction:
    """Predict the duration of one step of a scheduled program on `target`.

    Args:
        module: The scheduled program.
        target: The slice it was compiled for.
        coordinates: Torus coordinates of each device, in the program's order.
        slice_of_device: Slice number of each device.
        machine: The rates of a device; by default those of the catalog and `hardware.rates`.
        kernel_timer: Times Pallas kernels; by default `StepKernelTimer`.
        kernel_traces: Kernel traces by the name of their calls, for that default.
        tokens_per_step: Tokens per step, for tokens per second.
        model_flops: FLOPs of the model in one step over all devices, for MFU.
    """
    machine = machine or Machine.of(target)
    network = Network(machine, tuple(coordinates), tuple(slice_of_device))
    counter = KernelCounter(module)
    usual = StepKernelTimer(machine, kernel_traces or {}, counter=counter)
    simulation = Simulation(
        module, network, kernel_timer=kernel_timer or usual, kernel_counter=counter
    )
    seconds = simulation.run()
    ledger = simulation.ledger
    waiting = seconds * waiting_share(target.num_slices, per_doubling=machine.wait_per_doubling)
    seconds += waiting
    ledger.charge("dcn", waiting, 1)
    caveats: list[str] = []
    if ledger.unknown_kernels:
        caveats.append(
            f"{len(ledger.unknown_kernels)} Pallas kernels could not be timed "
            f"({ledger.unknown_kernels[0]} …) and count as nothing: the step takes longer."
        )
    if usual.by_stated_cost:
        caveats.append(
            f"{len(usual.by_stated_cost)} Pallas kernels ({usual.by_stated_cost[0]} …) are timed "
            "by the FLOPs and bytes they state, which they do not reach: the step takes longer."
        )
    if ledger.unknown_loops:
        caveats.append(
            f"{len(ledger.unknown_loops)} loops have no constant length "
            f"({ledger.unknown_loops[0]} …) and count as one iteration: the step takes longer."
        )
    between = dcn_rate(target.chip)
    if target.num_slices > 1 and between.origin == "model":
        caveats.append(f"the network between slices counts with {between.text} ({between.source}).")
    band = ScoredSteps.shipped().band
    return StepPrediction(
        slice=target,
        step_time_s=seconds,
        low_s=seconds * (1 - band.below),
        high_s=seconds * (1 + band.above),
        seconds_by_cause=dict(ledger.seconds),
        transfer_s=dict(ledger.hidden_s),
        hardware_flops=program_flops(module, counter),
        spans=tuple(ledger.spans),
        caveats=tuple(caveats),
        tokens_per_step=tokens_per_step,
        model_flops=model_flops,
        product_formats=frozenset(ledger.formats),
    )
