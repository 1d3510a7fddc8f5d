"""How long Pallas kernels run in a step: by a model of their kind, by bundles, by their word."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..bundles import CallTrace, calibration_of
from ..hlo import Computation, Instruction
from .attention import SplashTimer
from .machine import Machine
from .simulate import KernelTimer

_TILING = re.compile(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"')
_METADATA = "ragged-dot-metadata"
_GROUPED = re.compile(r"\bgrouped_matmul(_dlhs|_drhs)?(\.\d+)?(/pallas_call)?$")


@dataclass(frozen=True)
class RaggedDotTimer:
    """A `KernelTimer` for the kernels that XLA makes of `jax.lax.ragged_dot`.

    A tile of rows that two groups share is visited once for each, so there are as many visits as
    tiles and one more for every further group. Every visit reads its rows once for each tile of
    columns; weights stay while the group does, where one tile holds the whole sum.
    """

    machine: Machine

    @staticmethod
    def knows(kernel: Instruction) -> bool:
        """Whether `kernel` is one of them."""
        return kernel.op_name.endswith(_METADATA) or bool(_TILING.search(kernel.attributes))

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Seconds of one call, or None when `kernel` is none of them."""
        if kernel.op_name.endswith(_METADATA):
            return self.machine.op_overhead_s  # a few hundred integers
        tiling = _TILING.search(kernel.attributes)
        if tiling is None:
            return None
        tile_m, tile_k, tile_n = (int(size) for size in tiling.groups())
        rows, weights = (parent.by_name[name].shapes[0] for name in kernel.operands[-2:])
        (m, k), (groups, _, n) = rows.dims, weights.dims
        visits = math.ceil(m / tile_m) + groups - 1
        flops = 2.0 * visits * tile_m * k * n
        reads = visits * tile_m * rows.bytes / m * math.ceil(n / tile_n)
        stays = tile_k >= k
        loads = weights.bytes * (1.0 if stays else visits / groups)
        written = float(kernel.shapes[0].bytes)
        peak = self.machine.peak_flops(weights.dtype) * self.machine.matrix_efficiency
        return max(flops / peak, self.machine.hbm_s(reads + loads + written)) + (
            self.machine.op_overhead_s
        )


@dataclass(frozen=True)
class GroupedMatmulTimer:
    """A `KernelTimer` for tpukit's grouped products and their gradients.

    How often they run is decided by where tokens are routed, so nobody can follow them. They
    state what they do with the tiles they visit, each further group sharing one. Measured grouped
    kernels with 1024 or more rows a group reach, on the tiles they visit, what products reach
    that stay in no memory: .77 of peak on v6e, .73 on TPU7x, .93 on v5e, .90 on v5p.
    """

    machine: Machine

    @staticmethod
    def knows(kernel: Instruction) -> bool:
        """Whether `kernel` is one of them."""
        return bool(_GROUPED.match(kernel.name) or _GROUPED.search(kernel.op_name))

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Seconds of one call, or None when `kernel` is none of them."""
        if not self.knows(kernel):
            return None
        share = self.machine.streamed_matrix_efficiency
        return _stated_s(kernel, parent, self.machine, share_of_peak=share)


@dataclass(frozen=True)
class StatedCostTimer:
    """A `KernelTimer` for any kernel that states its FLOPs and bytes: it takes no less."""

    machine: Machine

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Seconds of one call at the rates ops reach, or None when nothing is stated."""
        share = self.machine.matrix_efficiency
        return _stated_s(kernel, parent, self.machine, share_of_peak=share)


def _stated_s(
    kernel: Instruction, parent: Computation, machine: Machine, *, share_of_peak: float
) -> float | None:
    stated = kernel.backend_config.get("custom_call_config", {}).get("cost_estimate")
    if not stated:
        return None
    dtypes = {parent.by_name[name].shapes[0].dtype for name in kernel.operands} - {"token"}
    peak = max(machine.peak_flops(dtype) for dtype in ("bf16", *dtypes))
    seconds = max(
        float(stated.get("flops", 0)) / (peak * share_of_peak),
        machine.hbm_s(float(stated.get("bytes_accessed", 0))),
    )
    return seconds + machine.op_overhead_s if seconds else None


def has_own_model(kernel: Instruction) -> bool:
    """Whether a model made from measured kernels of its kind times it."""
    timers = (SplashTimer, RaggedDotTimer, GroupedMatmulTimer)
    return any(timer.knows(kernel) for timer in timers)


@dataclass(frozen=True)
class BundleTimer:
    """A `KernelTimer` for kernels whose bundles were followed."""

    machine: Machine
    traces: Mapping[str, CallTrace]

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Seconds of one call at the rates of lone kernels, or None when it was not followed."""
        trace = self.traces.get(kernel.name)
        if trace is None:
            return None
        chip = self.machine.slice.chip
        alone = trace.estimate(calibration_of(chip.name).rates(chip)).time_s
        return alone * self.machine.op_time_in_a_step


@dataclass(frozen=True)
class StepKernelTimer:
    """A `KernelTimer` that asks one model after another.

    Attributes:
        traces: What kernels do, by the name of their calls.
        own: Models that are asked first, of kernels that those here do not know or take for others.
        by_stated_cost: Kernels no model knows, that were timed by the costs they state.
    """

    machine: Machine
    traces: Mapping[str, CallTrace] = field(default_factory=dict[str, CallTrace])
    own: tuple[KernelTimer, ...] = ()
    by_stated_cost: list[str] = field(default_factory=list[str])

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Seconds of one call, or None when nothing is known of it."""
        for timer in (
            *self.own,
            SplashTimer(self.machine),
            RaggedDotTimer(self.machine),
            GroupedMatmulTimer(self.machine),
            BundleTimer(self.machine, self.traces),
        ):
            seconds = timer(kernel, parent)
            if seconds is not None:
                return seconds
        seconds = StatedCostTimer(self.machine)(kernel, parent)
        if seconds is not None:
            self.by_stated_cost.append(kernel.name)
        return seconds
