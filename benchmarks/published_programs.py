"""How published steps are written where ours are not: what they round, multiply and attend with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from published_experts import TokamaxGroupedTimer
from published_rows import PublishedRun

from tpukit.compiler.bundles import CallTrace
from tpukit.compiler.program_flops import KernelCounter
from tpukit.compiler.timeline import Machine
from tpukit.compiler.timeline.kernels import SplashTimer, StepKernelTimer
from tpukit.compiler.timeline.simulate import KernelTimer
from tpukit.planner.cost.model_shape import ModelShape
from tpukit.planner.cost.step_variant import ROUNDED_BYTES, Rounding, StepVariant

# MaxText's int8 (AQT's config_v3 with jax.uniform): six operands for three products, gradients with
# a float32 of noise each, written and read.
AQT = Rounding(inputs=1, gradients=2, gradient_bytes=ROUNDED_BYTES + 2 * 4)
# Its fp8_full (Qwix) with fixed calibration: no value is read for the largest of its array.
FIXED_SCALES = Rounding(
    input_bytes=ROUNDED_BYTES - 2, gradient_bytes=ROUNDED_BYTES - 2, experts=True
)


@dataclass(frozen=True, kw_only=True)
class PublishedProgram(StepVariant):
    """A published step for the step model.

    Attributes:
        further_flops_per_token: Of products that ours does not make.
    """

    further_flops_per_token: float = 0.0

    def other_flops_per_token(self, shape: ModelShape) -> float:
        """Those beside the weights of layers and head."""
        return super().other_flops_per_token(shape) + self.further_flops_per_token


def program_of(run: PublishedRun) -> PublishedProgram:
    """The program of a row."""
    return PublishedProgram(
        attention=_attention(run),
        split_sequence="sequence" in run.workload.strategy,
        further_flops_per_token=run.further_flops_per_token,
        int8=AQT,
        fp8=FIXED_SCALES,
    )


def _attention(run: PublishedRun) -> Literal["splash", "splash in two", "plain"]:
    known: dict[object, Literal["splash", "splash in two"]] = {
        "splash": "splash",
        "splash in two": "splash in two",
        "ring": "splash",
    }
    return known.get(run.workload.attention, "plain")


class TokamaxSplashTimer(SplashTimer):
    """A `KernelTimer` for tokamax's splash kernels, which have the names of jax's."""

    def over_measured(self, kind: str) -> float:
        """The shares of peak were measured of these."""
        return 1.0


def kernel_timer(
    run: PublishedRun,
    machine: Machine,
    traces: Mapping[str, CallTrace] | None = None,
    counter: KernelCounter | None = None,
) -> StepKernelTimer:
    """What times the kernels of a row's program."""
    own: tuple[KernelTimer, ...] = ()
    if run.splash == "tokamax":
        own += (TokamaxSplashTimer(machine, counter),)
    if run.grouped == "tokamax":
        own += (TokamaxGroupedTimer(machine),)
    return StepKernelTimer(machine, traces or {}, own=own, counter=counter)
