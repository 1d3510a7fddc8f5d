"""Published programs that differ from a workload of ours: their expert layers and matmuls."""

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from measured_kernels import read_timings
from published_rows import PublishedRun

from tpukit.compiler.bundles import CallTrace
from tpukit.compiler.hlo import Computation, Instruction
from tpukit.compiler.program_flops import KernelCounter
from tpukit.compiler.timeline import Machine
from tpukit.compiler.timeline.kernels import GroupedMatmulTimer, SplashTimer, StepKernelTimer
from tpukit.compiler.timeline.simulate import KernelTimer
from tpukit.hardware.formats import parse_format
from tpukit.kernels.blocks.tiling import LANES
from tpukit.planner.cost.model_shape import ModelShape
from tpukit.planner.cost.step_variant import ROUNDED_BYTES, Rounding, StepVariant

TIMINGS = Path(__file__).parent / "data" / "kernel_timings.json.gz"
Kind: TypeAlias = Literal["fwd_gmm", "dlhs_gmm_rhs_transposed", "drhs_tgmm"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_BY_NAME: dict[str, Kind] = {"_dlhs": "dlhs_gmm_rhs_transposed", "_drhs": "drhs_tgmm"}
_NAME = re.compile(r"grouped_matmul(_dlhs|_drhs)?")


@dataclass(frozen=True)
class GroupedProduct:
    """Rows (M, width) times one of `groups` weights each, or the sum over them of two factors.

    Attributes:
        width: What is summed over; in a gradient of weights, the columns of the first factor.
        bits: Of a factor.
    """

    kind: Kind
    rows: int
    width: int
    columns: int
    groups: int
    bits: int

    @classmethod
    def of(cls, kernel: Instruction, parent: Computation) -> "GroupedProduct":
        """The product of a kernel of ours that `GroupedMatmulTimer` knows."""
        found = _NAME.search(kernel.name) or _NAME.search(kernel.op_name)
        kind = _BY_NAME.get(found[1] or "", "fwd_gmm") if found else "fwd_gmm"
        first, second = (parent.by_name[name].shapes[0] for name in kernel.operands[-2:])
        result = kernel.shapes[0].dims
        groups = result[0] if kind == "drhs_tgmm" else second.dims[0]
        bits = min(parse_format(shape.dtype).bits for shape in (first, second))
        rows, width = first.dims
        return cls(kind, rows, width, result[-1], groups, bits)

    @property
    def flops(self) -> float:
        """What has to be multiplied."""
        return 2.0 * self.rows * self.width * self.columns

    @property
    def fills_lanes(self) -> bool:
        """Whether its kernel need not blank the end of every tile, which takes it twice as long."""
        return self.width % LANES == 0 and self.columns % LANES == 0

    def visited_flops(self, tall: int) -> float:
        """With tiles of so many rows, which are visited once for each group that has some there."""
        visits = math.ceil(self.rows / tall) + self.groups - 1
        return self.flops * visits * tall / self.rows

    def distance(self, other: "GroupedProduct") -> float:
        """How many doublings lie between two sizes."""
        sizes = [(one.rows, one.width, one.columns, one.groups) for one in (self, other)]
        return sum(abs(math.log2(mine / its)) for mine, its in zip(*sizes, strict=True))


@dataclass(frozen=True)
class Measured:
    """A kernel that was measured alone, with tiles of `tall` rows."""

    product: GroupedProduct
    tall: int
    seconds: float

    @property
    def flops_per_s(self) -> float:
        """On the tiles it visits."""
        return self.product.visited_flops(self.tall) / self.seconds


@cache
def measured_products(chip: str) -> tuple[Measured, ...]:
    """Every grouped kernel of tokamax that was measured on a chip with its tiles."""
    found: list[Measured] = []
    for row in read_timings(TIMINGS).rows:
        if row.op != "ragged_dot" or row.impl != "pallas_mosaic_tpu" or row.chip != chip:
            continue
        if row.static_args.get("return_residuals"):  # the result is written twice
            continue
        tall, kind = row.config.get("tile_m"), row.dims.get("variant")
        sizes = [row.dims.get(name) for name in ("m", "k", "n", "num_groups")]
        if kind not in KINDS or not all(isinstance(size, int) for size in (tall, *sizes)):
            continue
        bits = parse_format(row.dtypes["lhs"]).bits
        rows, width, columns, groups = cast(list[int], sizes)
        product = GroupedProduct(kind, rows, width, columns, groups, bits)
        found.append(Measured(product, cast(int, tall), row.measured_us * 1e-6))
    return tuple(found)


@dataclass(frozen=True)
class TokamaxGroupedTimer:
    """A `KernelTimer` for tokamax's grouped products, at the places of ours."""

    machine: Machine

    def __call__(self, kernel: Instruction, parent: Computation) -> float | None:
        """Seconds of one call; None for other kernels, and where none of its kind was measured."""
        if not GroupedMatmulTimer.knows(kernel):
            return None
        return self.seconds(GroupedProduct.of(kernel, parent))

    def seconds(self, product: GroupedProduct) -> float | None:
        """Of one product, in a step: the median of the nearest that were measured."""
        alike = [
            one
            for one in measured_products(self.machine.slice.chip.name)
            if one.product.bits == product.bits and one.product.fills_lanes == product.fills_lanes
        ]
        candidates = [one for one in alike if one.product.kind == product.kind] or alike
        if not candidates:
            return None
        nearest = min(product.distance(one.product) for one in candidates)
        chosen = [one for one in candidates if product.distance(one.product) == nearest]
        alone = [product.visited_flops(one.tall) / one.flops_per_s for one in chosen]
        return statistics.median(alone) * self.machine.op_time_in_a_step


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
