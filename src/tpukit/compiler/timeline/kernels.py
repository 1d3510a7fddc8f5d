"""Time Pallas kernels in a step: by a model of their kind, by bundles, or by stated costs."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..bundles import CallTrace, calibration_of
from ..hlo import Computation, Instruction, Shape
from ..program_flops import KernelCounter
from .machine import Machine
from .simulate import KernelTimer

# Products of each splash kernel that are as wide as a head of queries, and as one of values.
_SPLASH_PRODUCTS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2), "dkv fused": (3, 2)}
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)")


@dataclass(frozen=True)
class SplashTimer:
    """A `KernelTimer` for jax's splash kernels only.

    Attributes:
        counter: Counts the visited blocks, if the kernel's tables are in the program.
    """

    machine: Machine
    counter: KernelCounter | None = None

    @staticmethod
    def knows(kernel: Instruction) -> bool:
        """Whether `kernel` is a splash kernel."""
        return _splash_name(kernel) is not None

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Return the seconds of one call, or None if `kernel` is not a splash kernel."""
        found = _splash_name(kernel)
        if found is None:
            return None
        operands = [parent.by_name[name].shapes[0] for name in kernel.operands]
        queries, keys, values = [shape for shape in operands if shape.dtype in ("bf16", "f32")][:3]
        kind = found[1]
        if kind == "dkv" and len(kernel.shapes) > 2 and _has_partial_dq(kernel, queries):
            kind = "dkv fused"
        head, value_head = queries.dims[-1], values.dims[-1]
        counted = None if self.counter is None else self.counter(kernel, parent)
        if counted is not None and counted.value is not None and not counted.stated:
            flops = counted.value
        else:
            visited = _visited_share(operands, queries, keys, by_keys="dkv" in kind)
            as_queries, as_values = _SPLASH_PRODUCTS[kind]
            width = as_queries * head + as_values * value_head
            flops = 2.0 * (queries.elements // head) * keys.dims[-2] * visited * width
        share = self.machine.attention_share((head + value_head) / 2)
        if kind != "fwd":
            share *= self.machine.attention.backward_over_forward
        at_peak = flops / self.machine.peak_flops("bf16")
        in_a_step = self.over_measured(kind) * self.machine.op_time_in_a_step / share
        return at_peak * max(1.0, in_a_step)

    def over_measured(self, kind: str) -> float:
        """Return the kernel's time over that of tokamax's, on which the shares were measured."""
        rates = self.machine.attention
        return rates.jax_over_tokamax_forward if kind == "fwd" else rates.jax_over_tokamax_backward


def _splash_name(kernel: Instruction) -> re.Match[str] | None:
    return _SPLASH.search(kernel.name) or _SPLASH.search(kernel.op_name)


def _has_partial_dq(kernel: Instruction, queries: Shape) -> bool:
    """Whether a fused backward kernel also writes dq, once per block of keys."""
    return any(shape.elements >= queries.elements for shape in kernel.shapes)


def _visited_share(operands: list[Shape], queries: Shape, keys: Shape, *, by_keys: bool) -> float:
    """Return the share of (query, key) blocks that the kernel visits.

    Its first operands tabulate the grid of blocks. A causal mask keeps the whole grid and skips
    blocks above the diagonal. A window shrinks the grid to the key blocks in reach of a query
    block; in a kernel that iterates over keys, to the query blocks in reach of a key block. Query
    and key blocks are assumed to have equal size.
    """
    tables = [shape for shape in operands if shape.dtype in ("s8", "s32", "s16")]
    grid = next((shape.dims[-2:] for shape in tables if len(shape.dims) >= 3), None)
    if grid is None:
        return 0.5
    whole, visited = reversed(grid) if by_keys else grid
    lengths = (keys.dims[-2], queries.dims[-2]) if by_keys else (queries.dims[-2], keys.dims[-2])
    seen = visited * lengths[0] / whole
    if whole == visited or seen >= lengths[1]:
        n = max(grid)
        return (n + 1) / (2 * n)
    return seen / lengths[1]


_TILING = re.compile(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"')
_METADATA = "ragged-dot-metadata"
_GROUPED = re.compile(r"\bgrouped_matmul(_dlhs|_drhs)?(\.\d+)?(/pallas_call)?$")


@dataclass(frozen=True)
class RaggedDotTimer:
    """A `KernelTimer` for the kernels that XLA generates for `jax.lax.ragged_dot`.

    A row tile that two groups share is visited once per group, so there are as many visits as
    tiles, plus one per further group. Every visit reads its rows once per column tile. Weights stay
    in VMEM during a group if one tile covers the whole contraction.
    """

    machine: Machine

    @staticmethod
    def knows(kernel: Instruction) -> bool:
        """Whether `kernel` is a ragged dot."""
        return kernel.op_name.endswith(_METADATA) or bool(_TILING.search(kernel.attributes))

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Return the seconds of one call, or None if `kernel` is not a ragged dot."""
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
    """A `KernelTimer` for tpukit's grouped matmuls and their gradients.

    The routing of tokens decides how often they run, so their bundles cannot be followed. They
    state their costs for the tiles they visit, with one shared tile per further group, and are
    timed at the rate of measured grouped kernels.
    """

    machine: Machine

    @staticmethod
    def knows(kernel: Instruction) -> bool:
        """Whether `kernel` is a grouped matmul of tpukit."""
        return bool(_GROUPED.match(kernel.name) or _GROUPED.search(kernel.op_name))

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Return the seconds of one call, or None if `kernel` is no grouped matmul."""
        if not self.knows(kernel):
            return None
        share = self.machine.grouped_efficiency
        return _stated_s(kernel, parent, self.machine, share_of_peak=share)


@dataclass(frozen=True)
class StatedCostTimer:
    """A `KernelTimer` for kernels that state their FLOPs and bytes, which give a lower bound."""

    machine: Machine

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Return the seconds of one call at the rates of ops, or None without stated costs."""
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
    """Whether a kernel has a model of its kind, fitted on measured kernels."""
    timers = (SplashTimer, RaggedDotTimer, GroupedMatmulTimer)
    return any(timer.knows(kernel) for timer in timers)


@dataclass(frozen=True)
class BundleTimer:
    """A `KernelTimer` for kernels with a bundle trace."""

    machine: Machine
    traces: Mapping[str, CallTrace]

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Return the seconds of one call at the rates of lone kernels, or None without a trace."""
        trace = self.traces.get(kernel.name)
        if trace is None:
            return None
        chip = self.machine.slice.chip
        alone = trace.estimate(calibration_of(chip.name).rates(chip)).time_s
        return alone * self.machine.op_time_in_a_step


@dataclass(frozen=True)
class StepKernelTimer:
    """A `KernelTimer` that tries several models in turn.

    Attributes:
        traces: Kernel traces, by the name of their calls.
        own: The caller's models, which are tried first.
        counter: Counts the FLOPs of this program's kernels.
        by_stated_cost: Names of kernels without a model, timed by their stated costs.
    """

    machine: Machine
    traces: Mapping[str, CallTrace] = field(default_factory=dict[str, CallTrace])
    own: tuple[KernelTimer, ...] = ()
    counter: KernelCounter | None = None
    by_stated_cost: list[str] = field(default_factory=list[str])

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Return the seconds of one call, or None if no model covers the kernel."""
        for timer in (
            *self.own,
            SplashTimer(self.machine, self.counter),
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
