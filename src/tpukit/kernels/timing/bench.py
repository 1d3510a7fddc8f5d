"""Estimate an op's cases on several generations without a TPU, beside plain XLA."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import TPUError
from ...hardware import get_chip
from ...plain_data import JsonObject
from ...runtime.progress import Progress, silent
from ...shown import Shown
from ..registry.op import (
    PALLAS_TPU,
    REFERENCE,
    Blocks,
    Direction,
    KernelCase,
    Op,
    find_implementation,
)
from .estimating import KernelEstimate, estimate_kernel, format_time

# Implementations in plain XLA: what a user would have without the kernel.
PLAIN = ("xla", REFERENCE)
# Values of a case's integer arguments by position, where they decide what a kernel does.
Values = Callable[[KernelCase], Mapping[int, Any]]


@dataclass(frozen=True)
class BenchRow:
    """One implementation of an op at one case on one generation.

    Attributes:
        estimate: None if the implementation does not compile.
        error: The reason why it does not compile.
    """

    case: str
    chip: str
    implementation: str
    estimate: KernelEstimate | None
    error: str = ""

    @property
    def time_s(self) -> float | None:
        """The estimated time, if there is one."""
        return None if self.estimate is None else self.estimate.time_s

    @property
    def why_not(self) -> str:
        """The reason why there is no time; empty if there is one."""
        return self.error or (self.estimate.reason if self.estimate else "")

    def to_dict(self) -> JsonObject:
        """Return the row as plain data."""
        return {
            "case": self.case,
            "chip": self.chip,
            "implementation": self.implementation,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
            "error": self.error,
        }


@dataclass(frozen=True)
class KernelBench(Shown):
    """The rows that `bench_op` estimated."""

    op: str
    direction: Direction
    rows: tuple[BenchRow, ...]

    def speedup(self, row: BenchRow) -> float | None:
        """Return how many times faster a row is than the fastest XLA row of its case and chip."""
        plain = [
            other.time_s
            for other in self.rows
            if (other.case, other.chip) == (row.case, row.chip)
            and other.implementation in PLAIN
            and other.time_s is not None
        ]
        if not plain or row.time_s is None or row.implementation in PLAIN:
            return None
        return min(plain) / row.time_s

    @property
    def is_timed(self) -> bool:
        """Whether every kernel has a time; without kernels, whether any row has one."""
        kernels = [row for row in self.rows if row.implementation not in PLAIN]
        if kernels:
            return all(row.time_s is not None for row in kernels)
        return any(row.time_s is not None for row in self.rows)

    def to_dict(self) -> JsonObject:
        """Return plain data; every figure has origin `model`."""
        return {
            "op": self.op,
            "direction": self.direction,
            "origin": "model",
            "rows": [{**row.to_dict(), "speedup": self.speedup(row)} for row in self.rows],
        }

    def __rich__(self) -> Any:
        from itertools import groupby

        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [Text(self.title, style="bold")]
        for _, rows in groupby(self.rows, key=lambda row: (row.case, row.chip)):
            parts.append(self.part(list(rows)))
        return Group(*parts)

    @property
    def title(self) -> str:
        """The op, the direction and the origin of the figures."""
        return f"{self.op} {self.direction}, estimated with no TPU (origin: model)"

    def part(self, rows: "list[BenchRow]") -> Any:
        """Return one case on one chip, for a terminal."""
        from rich.console import Group
        from rich.text import Text

        heading = Text(f"\n{rows[0].case} on {rows[0].chip}", style="cyan")
        return Group(heading, self._table(rows))

    def _table(self, rows: "list[BenchRow]") -> Any:
        from rich.table import Table

        table = Table("", "time", "error", "vs XLA", "cycles", "bound", box=None, pad_edge=False)
        for row in rows:
            if row.estimate is None or row.time_s is None:
                table.add_row(row.implementation, "—", row.why_not)
                continue
            estimate, speedup = row.estimate, self.speedup(row)
            busiest = sorted(estimate.utilisation.items(), key=lambda item: -item[1])[:2]
            used = ", ".join(f"{unit} {share:.0%}" for unit, share in busiest)
            table.add_row(
                row.implementation,
                format_time(row.time_s),
                estimate.band if estimate.calls else "",
                "" if speedup is None else f"{speedup:.2f}x",
                f"{estimate.cycles:,.0f}" if estimate.calls else "",
                f"{estimate.bound} ({used})" if estimate.calls else "",
            )
        return table


def bench_op(
    op: Op,
    chips: Sequence[str],
    *,
    cases: Sequence[KernelCase] | None = None,
    direction: Direction = "forward",
    implementations: Sequence[str] | None = None,
    values: Values | None = None,
    progress: Progress = silent,
    on_rows: Callable[[KernelBench], None] | None = None,
    use_cache: bool = True,
) -> KernelBench:
    """Estimate the time of an op on generations without having them.

    Args:
        op: The op to time.
        chips: Generations, e.g. ("v5e", "v6e").
        cases: Shapes; by default the op's own.
        direction: "backward" times the gradient, with the forward pass it needs.
        implementations: By default the kernel and the XLA implementations.
        values: (case) -> values of integer arguments that decide what a kernel does, such as group
            sizes; by default the op's own.
        progress: Called with each row's name before it is compiled.
        on_rows: Called with the rows of each case and generation when they are done.
        use_cache: Whether to read and keep results on disk.

    Raises:
        SliceError: There is no such generation.
        TPUKernelError: The op has no such implementation.
    """
    names = [get_chip(chip).name for chip in chips]
    wanted = implementations or default_implementations(op)
    for implementation in wanted:
        find_implementation(op.name, op.implementations, implementation)
    rows: list[BenchRow] = []
    for case in cases or op.cases:
        for chip in names:
            for implementation in wanted:
                progress(f"{op.name} {case.name} on {chip} as {implementation}")
                row = _row(op, case, chip, implementation, direction, values, use_cache)
                rows.append(row)
            if on_rows is not None:
                on_rows(KernelBench(op.name, direction, tuple(rows[-len(wanted) :])))
    return KernelBench(op.name, direction, tuple(rows))


def default_implementations(op: Op) -> list[str]:
    """Return the names of the kernel and of the XLA implementations."""
    return [name for name in (PALLAS_TPU, *PLAIN) if name in op.implementations]


def estimate(
    op: Op,
    case: KernelCase,
    chip: str,
    blocks: Blocks | None = None,
    *,
    direction: Direction = "forward",
    implementation: str = PALLAS_TPU,
    values: Values | None = None,
    use_cache: bool = True,
) -> KernelEstimate:
    """Estimate one case of an op on a generation, with its chosen blocks or the given ones.

    Raises:
        XLACompilationError: The compiler refused it.
        TPUKernelError: The op refused it.
    """
    function = op.bind(case, implementation=implementation, blocks=blocks, direction=direction)
    known = values or op.values
    return estimate_kernel(
        function,
        case.arguments,
        chip,
        scalar_inputs=None if known is None else known(case),
        kind=kind_of(op, direction),
        use_cache=use_cache,
    )


def kind_of(op: Op, direction: Direction) -> str:
    """Return the kernel kind under which an op's measured errors are filed."""
    return op.name if direction == "forward" else f"{op.name}_backward"


def _row(
    op: Op,
    case: KernelCase,
    chip: str,
    implementation: str,
    direction: Direction,
    values: Values | None,
    use_cache: bool,
) -> BenchRow:
    try:
        estimated = estimate(
            op,
            case,
            chip,
            direction=direction,
            implementation=implementation,
            values=values,
            use_cache=use_cache,
        )
    except TPUError as error:
        return BenchRow(case.name, chip, implementation, None, str(error))
    return BenchRow(case.name, chip, implementation, estimated)
