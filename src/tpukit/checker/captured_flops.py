"""How much of the peak a captured step reaches, by the FLOPs counted in the user's own trace."""

from typing import TYPE_CHECKING

from ..capturing.captured import CapturedProgram
from ..compiler.compiled import CompiledStep
from ..compiler.program_flops import kernels_of_model_flops
from ..hardware import Figure
from ..hardware.figure import flops_text

if TYPE_CHECKING:
    from .result import CheckResult

COUNTED = (
    "FLOPs of the program's matmuls (masked attention counted whole, Pallas kernels as they run), "
    "without what jax.checkpoint recomputes,"
)
COUNTED_WITH_RECOMPUTATION = "FLOPs of the compiled program, recomputation included,"
_SHARE = "share of peak"


def count_model_flops(program: CapturedProgram, compiled: CompiledStep) -> Figure:
    """Return the FLOPs of one run over all devices, without recomputation.

    Matmuls are counted in the jaxpr of the user's own call, where jax marks what `jax.checkpoint`
    computes a second time. Pallas kernels are counted in the compiled program, because a jaxpr
    does not show which blocks they visit.
    """
    about = program.about
    if about.model_flops is None:
        return Figure.missing("FLOP", "an earlier version kept this capture; capture it again.")
    if about.open_flops:
        return Figure.missing(
            "FLOP", "matmuls run in loops without a constant length; use lax.scan or fori_loop."
        )
    matmuls = Figure(about.model_flops, "FLOP", "model", "matmuls of the program as jax traced it")
    if not about.kernels:
        return matmuls
    return matmuls + kernels_of_model_flops(compiled.module).scaled(program.devices)


def model_flops_per_step(result: "CheckResult") -> Figure:
    """Return the model FLOPs of all programs of one step, over all devices."""
    return _total(
        [
            count_model_flops(_program(one), one.compiled).scaled(one.calls)
            for one in (result, *result.parts)
        ]
    )


def hardware_flops_per_step(result: "CheckResult") -> Figure:
    """Return the FLOPs that all devices compute in one step, recomputation included."""
    return _total(
        [
            one.compiled.flops.scaled(one.calls * _program(one).devices)
            for one in (result, *result.parts)
        ]
    )


def share_of_peak(flops: Figure, result: "CheckResult") -> Figure:
    """Return the share of the slice's peak that FLOPs reach in the predicted step."""
    seconds, prediction = result.step_time_s, result.prediction
    if seconds is None or prediction is None:
        return Figure.missing(_SHARE, result.no_prediction or "a program has no predicted step.")
    target = result.compiled.slice
    peak = target.peak_tflops(prediction.mfu_peak)
    time = Figure(seconds, "s", "model", "the predicted step")
    reached = None
    if flops.value is not None and peak.value:
        reached = flops.value / seconds / (peak.value * 1e12)
    return Figure.derived(reached, _SHARE, inputs=(flops, time, peak))


def utilization_lines(result: "CheckResult") -> list[str]:
    """Return what a terminal shows of a captured step's utilization."""
    if result.prediction is None:
        return []
    model, hardware = model_flops_per_step(result), hardware_flops_per_step(result)
    mfu, reached = share_of_peak(model, result), share_of_peak(hardware, result)
    lines: list[str] = []
    if mfu.value is None:
        lines.append(f"MFU: – ({mfu.reason})")
    else:
        counted = flops_text(model.value or 0.0)
        lines.append(f"MFU {mfu.value:.1%} [{mfu.origin}]: {counted} per step, {COUNTED[:-1]}")
    if reached.value is None:
        lines.append(f"hardware utilization: – ({reached.reason})")
    else:
        lines.append(
            f"hardware utilization {reached.value:.1%} [{reached.origin}]: "
            f"{flops_text(hardware.value or 0.0)} per step, recomputation included"
        )
    return lines


def _program(result: "CheckResult") -> CapturedProgram:
    assert result.program is not None
    return result.program


def _total(figures: list[Figure]) -> Figure:
    total = figures[0]
    for one in figures[1:]:
        total = total + one
    return total
