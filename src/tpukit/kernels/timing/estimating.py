"""Estimate the time of a function with Pallas kernels on a chip without having one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...compiler.bundles import (
    Calibration,
    CallEstimate,
    ErrorBand,
    calibration_of,
    describe_band,
    error_of,
)
from ...compiler.hlo import Computation, Instruction
from ...compiler.timeline import StepPrediction, predict_step
from ...compiler.timeline.kernels import RaggedDotTimer
from ...compiler.timeline.machine import Machine
from ...plain_data import JsonObject
from ...runtime.progress import Progress, silent
from ...shown import Shown
from .profile import KernelProfile, profile_kernel


def format_time(seconds: float | None) -> str:
    """Return microseconds or milliseconds with three significant digits."""
    if seconds is None:
        return "—"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def estimate_panel(estimate: "KernelEstimate") -> Any:
    """Return the time in one line, then a table of the kernels."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = f"{estimate.name} on {estimate.chip}: {format_time(estimate.time_s)}"
    if estimate.reason:
        return Text(f"{head}  ({estimate.reason})")
    head += (
        f"  [model, {estimate.band}]: kernels {format_time(estimate.kernel_s)}, "
        f"the rest {format_time(estimate.surrounding_s)}"
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("kernel", "times", "each", "cycles", "stalled", "turns", "bound", "used"):
        table.add_column(heading)
    for name, call in estimate.calls.items():
        used = sorted(call.utilisation.items(), key=lambda item: -item[1])[:4]
        table.add_row(
            name,
            str(estimate.times[name]),
            format_time(call.time_s),
            f"{call.cycles:,.0f}",
            f"{call.stall_cycles / call.cycles:.0%}",
            str(call.loop_turns),
            call.bound,
            ", ".join(f"{unit} {share:.0%}" for unit, share in used),
        )
    notes = [Text(f"note: {caveat}", style="yellow") for caveat in estimate.caveats]
    return Group(Text(head, style="bold"), table, *notes)


@dataclass(frozen=True)
class KernelEstimate(Shown):
    """A function's time on one device of a chip; every figure has origin `model`.

    Attributes:
        name: The function's name.
        kind: The kernel kind; None for a function of no kind.
        time_s: Time of the kernels and the ops around them; None with a `reason`.
        kernel_s: Time of the kernels alone.
        surrounding_s: Time of everything else that a kernel does not hide.
        error: How far estimates of the named kinds were from measured times; None without
            measurements.
        calls: Each kernel call, by its name in the compiled program.
        times: How often each kernel is called.
        bundle_count: Number of bundles of the kernels' programs.
        reason: Why there is no time.
        caveats: What the model could not take into account.
    """

    name: str
    chip: str
    kind: str | None
    time_s: float | None
    kernel_s: float
    surrounding_s: float
    error: ErrorBand | None
    calls: Mapping[str, CallEstimate] = field(repr=False)
    times: Mapping[str, int] = field(repr=False)
    bundle_count: int
    reason: str = ""
    caveats: tuple[str, ...] = ()

    @property
    def cycles(self) -> float:
        """Cycles of the kernels, on the core that finishes last."""
        return self._sum(lambda call: call.cycles)

    @property
    def compute_cycles(self) -> float:
        """Cycles of issuing bundles and waiting for results, as the compiler schedules them."""
        return self._sum(lambda call: call.compute_cycles)

    @property
    def dma_stall_cycles(self) -> float:
        """Cycles of waiting for transfers."""
        return self._sum(lambda call: call.stall_cycles)

    @property
    def overhead_cycles(self) -> float:
        """Cycles of starting transfers, of outermost loop iterations and of launches."""
        return self._sum(lambda call: call.overhead_cycles)

    @property
    def dma_bytes(self) -> float:
        """Bytes that the kernels move between HBM and the core."""
        return self._sum(lambda call: call.hbm_bytes)

    @property
    def grid_steps(self) -> float:
        """Iterations of the kernels' outermost loops."""
        return self._sum(lambda call: call.loop_turns)

    @property
    def low_s(self) -> float | None:
        """Lower end of the band: nine in ten measured times were at least this.

        None for a kernel kind without measurements.
        """
        band = self._own_band
        return None if self.time_s is None or band is None else self.time_s * (1 - band.below)

    @property
    def high_s(self) -> float | None:
        """Upper end of the band: nine in ten measured times were at most this."""
        band = self._own_band
        return None if self.time_s is None or band is None else self.time_s * (1 + band.above)

    @property
    def band(self) -> str:
        """The error of the estimate, in words."""
        return describe_band(self.error, self.kind)

    @property
    def _own_band(self) -> ErrorBand | None:
        return self.error if self.error is not None and self.kind in self.error.kinds else None

    @cached_property
    def utilisation(self) -> dict[str, float]:
        """Utilisation of each unit during the kernels, and of HBM bandwidth."""
        total = self.cycles
        units = {unit for call in self.calls.values() for unit in call.utilisation}
        return {
            unit: self._sum(lambda call, unit=unit: call.utilisation[unit] * call.cycles) / total
            for unit in sorted(units)
        }

    @property
    def bound(self) -> str:
        """The unit that bounds the longest kernel call."""
        if not self.calls:
            return "no kernel"
        return max(self.calls.values(), key=lambda call: call.cycles * self.times[call.name]).bound

    def _sum(self, part: Callable[[CallEstimate], float]) -> float:
        return sum(part(call) * self.times[name] for name, call in self.calls.items())

    def to_dict(self) -> JsonObject:
        """Return the estimate as plain data."""
        return {
            "origin": "model",
            "name": self.name,
            "chip": self.chip,
            "kind": self.kind,
            "time_s": self.time_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "reason": self.reason,
            "error": None if self.error is None else self.error.to_dict(),
            "kernel_s": self.kernel_s,
            "surrounding_s": self.surrounding_s,
            "cycles": self.cycles,
            "compute_cycles": self.compute_cycles,
            "dma_stall_cycles": self.dma_stall_cycles,
            "overhead_cycles": self.overhead_cycles,
            "dma_bytes": self.dma_bytes,
            "grid_steps": self.grid_steps,
            "bundle_count": self.bundle_count,
            "bound": self.bound,
            "utilisation": self.utilisation,
            "calls": {
                name: {"times": self.times[name], **call.to_dict()}
                for name, call in self.calls.items()
            },
            "caveats": list(self.caveats),
        }

    def __rich__(self) -> Any:
        return estimate_panel(self)


def estimate_kernel(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    chip: str,
    *,
    scalar_inputs: Mapping[int, Any] | None = None,
    kind: str | None = None,
    calibration: Calibration | None = None,
    progress: Progress = silent,
    use_cache: bool = True,
) -> KernelEstimate:
    """Estimate how long a function takes on one device of a chip, without a TPU.

    Args:
        function: Any function that jax can trace, with or without Pallas kernels.
        arguments: Shapes, or arrays where the values decide what a kernel does (group sizes).
        chip: A generation: "v5e", "v5p", "v6e", "7x".
        scalar_inputs: Values of flat arguments by position, for those given as shapes.
        kind: The kernel kind whose measurements give the error of the estimate.
        calibration: Constants other than the fitted ones.
        progress: Called with each stage of the compile.
        use_cache: Whether to read and keep results on disk.

    Raises:
        XLACompilationError: The compiler refused the program.
        SliceError: There is no such generation.
    """
    profile = profile_kernel(
        function,
        arguments,
        chip,
        scalar_inputs=scalar_inputs,
        progress=progress,
        use_cache=use_cache,
    )
    return time_profile(profile, kind=kind, calibration=calibration)


def time_profile(
    profile: KernelProfile, *, kind: str | None = None, calibration: Calibration | None = None
) -> KernelEstimate:
    """Time a profile from `profile_kernel`; other constants need no other compile."""
    chip = profile.chip
    rates = (calibration or calibration_of(chip.name, kind)).rates(chip)
    calls = {name: trace.estimate(rates) for name, trace in profile.calls.items()}

    by_tiles = RaggedDotTimer(_machine(profile))

    def timer(kernel: Instruction, parent: Computation) -> float | None:
        call = calls.get(kernel.name)
        return by_tiles(kernel, parent) if call is None else call.time_s

    def others(kernel: Instruction, parent: Computation) -> float | None:
        return 0.0 if kernel.name in calls else by_tiles(kernel, parent)

    prediction = _predict(profile, timer)
    times = {
        span.name: span.times
        for span in prediction.spans
        if span.track == "core" and span.cause == "kernel"
    }
    reason = "; ".join(profile.reasons.values())
    called = {name: call for name, call in calls.items() if name in times}
    return KernelEstimate(
        name=profile.compiled.name,
        chip=chip.name,
        kind=kind,
        time_s=None if reason else prediction.step_time_s,
        kernel_s=sum(call.time_s * times[name] for name, call in called.items()),
        surrounding_s=_predict(profile, others).step_time_s,
        error=error_of(chip.name, kind) if called else None,  # measured on kernels, not on XLA
        calls=called,
        times=times,
        bundle_count=profile.bundle_count,
        reason=reason,
        caveats=() if reason else prediction.caveats,
    )


def _predict(profile: KernelProfile, timer: Any) -> StepPrediction:
    compiled = profile.compiled
    return predict_step(
        compiled.module,
        compiled.slice,
        coordinates=compiled.coordinates,
        slice_of_device=compiled.slice_of_device,
        machine=_machine(profile),
        kernel_timer=timer,
    )


def _machine(profile: KernelProfile) -> Machine:
    """Return the device alone, as kernels are measured: no op hides its first transfers."""
    return Machine.of(profile.compiled.slice, op_time_in_a_step=1.0)
