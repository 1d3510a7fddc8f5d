"""How long a function with Pallas kernels takes on a chip nobody has at hand."""

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
from ...runtime.progress import Progress, silent
from ...shown import Shown
from .profile import KernelProfile, profile_kernel


@dataclass(frozen=True)
class KernelEstimate(Shown):
    """A function's time on one device of a chip; every figure has origin `model`.

    Attributes:
        name: The function's name.
        kind: The op class that was asked for; None for a function of no class.
        time_s: Of everything: kernels and the ops around them; None with a `reason`.
        kernel_s: Of the kernels alone.
        surrounding_s: Of everything else, where a kernel does not hide it.
        error: How far estimates were from measured times, of the kinds it names; None when nobody
            measured.
        calls: Each kernel call, by its name in the compiled program.
        times: How often each is called.
        bundle_count: Bundles of the kernels' programs.
        reason: Why there is no time.
        caveats: What the model could not see.
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
        """Cycles of the kernels, on the core that ends last."""
        return self._sum(lambda call: call.cycles)

    @property
    def compute_cycles(self) -> float:
        """Issuing bundles and waiting for results, as the compiler reckons them."""
        return self._sum(lambda call: call.compute_cycles)

    @property
    def dma_stall_cycles(self) -> float:
        """Waiting for transfers."""
        return self._sum(lambda call: call.stall_cycles)

    @property
    def overhead_cycles(self) -> float:
        """Starting transfers, iterations of the outermost loop, launches."""
        return self._sum(lambda call: call.overhead_cycles)

    @property
    def dma_bytes(self) -> float:
        """Moved between HBM and the core by the kernels."""
        return self._sum(lambda call: call.hbm_bytes)

    @property
    def grid_steps(self) -> float:
        """Turns of the kernels' outermost loops."""
        return self._sum(lambda call: call.loop_turns)

    @property
    def low_s(self) -> float | None:
        """Nine in ten measured times were at least this, relative to their estimates.

        None for a kind of which nobody measured any.
        """
        band = self._own_band
        return None if self.time_s is None or band is None else self.time_s * (1 - band.below)

    @property
    def high_s(self) -> float | None:
        """The other end of the band: nine in ten measured times were at most this."""
        band = self._own_band
        return None if self.time_s is None or band is None else self.time_s * (1 + band.above)

    @property
    def band(self) -> str:
        """How far it may be off, in words."""
        return describe_band(self.error, self.kind)

    @property
    def _own_band(self) -> ErrorBand | None:
        return self.error if self.error is not None and self.kind in self.error.kinds else None

    @cached_property
    def utilisation(self) -> dict[str, float]:
        """Share of the kernels' time each unit is used, and of HBM's rate."""
        total = self.cycles
        units = {unit for call in self.calls.values() for unit in call.utilisation}
        return {
            unit: self._sum(lambda call, unit=unit: call.utilisation[unit] * call.cycles) / total
            for unit in sorted(units)
        }

    @property
    def bound(self) -> str:
        """What bounds the call that takes the longest."""
        if not self.calls:
            return "no kernel"
        return max(self.calls.values(), key=lambda call: call.cycles * self.times[call.name]).bound

    def _sum(self, part: Callable[[CallEstimate], float]) -> float:
        return sum(part(call) * self.times[name] for name, call in self.calls.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
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
        from .view import estimate_panel

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
    """Estimate how long a function takes on one device of a chip, with no TPU.

    Args:
        function: Anything jax can trace, with Pallas kernels inside or without.
        arguments: Shapes, or arrays where the values decide what a kernel does (group sizes).
        chip: A generation: "v5e", "v5p", "v6e", "7x".
        scalar_inputs: Values of flat arguments by position, for those given as shapes.
        kind: The op class whose measured kernels say how far the estimate is off.
        calibration: Constants other than the fitted ones.
        progress: Called with each stage of the compile.
        use_cache: Whether an answer on disk will do, and this one is kept.

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
    """Time what `profile_kernel` found; other constants need no other compile."""
    chip = profile.chip
    rates = (calibration or calibration_of(chip.name, kind)).rates(chip)
    calls = {name: trace.estimate(rates) for name, trace in profile.calls.items()}

    by_tiles = RaggedDotTimer(_machine(profile))

    def timer(kernel: Instruction, parent: Computation) -> float | None:
        found = calls.get(kernel.name)
        return by_tiles(kernel, parent) if found is None else found.time_s

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
    """The device alone, as kernels are measured: no op before it hides its first transfers."""
    return Machine.of(profile.compiled.slice, op_time_in_a_step=1.0)
