"""An op's cases on several generations, timed with no TPU, beside what XLA alone makes of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import TPUError
from ...hardware import get_chip
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
from .estimating import KernelEstimate, estimate_kernel
from .view import format_time

# Implementations that XLA alone makes: what a user would have without the kernel.
PLAIN = ("xla", REFERENCE)
# Values of a case's integer arguments by position, where they decide what a kernel does.
Values = Callable[[KernelCase], Mapping[int, Any]]


@dataclass(frozen=True)
class BenchRow:
    """One implementation of an op at one case on one generation.

    Attributes:
        estimate: None when it does not compile; `error` then says why.
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
        """Why there is no time; "" when there is."""
        return self.error or (self.estimate.reason if self.estimate else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "case": self.case,
            "chip": self.chip,
            "implementation": self.implementation,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
            "error": self.error,
        }


@dataclass(frozen=True)
class KernelBench(Shown):
    """What `bench_op` found."""

    op: str
    direction: Direction
    rows: tuple[BenchRow, ...]

    def speedup(self, row: BenchRow) -> float | None:
        """How many times faster a row is than the fastest plain one of its case and chip."""
        plain = [
            one.time_s
            for one in self.rows
            if (one.case, one.chip) == (row.case, row.chip)
            and one.implementation in PLAIN
            and one.time_s is not None
        ]
        if not plain or row.time_s is None or row.implementation in PLAIN:
            return None
        return min(plain) / row.time_s

    @property
    def is_timed(self) -> bool:
        """Whether every kernel has a time, or, where no kernel was asked for, anything has one."""
        kernels = [row for row in self.rows if row.implementation not in PLAIN]
        if kernels:
            return all(row.time_s is not None for row in kernels)
        return any(row.time_s is not None for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; every figure has origin `model`."""
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
        """What the figures are of, and where they come from."""
        return f"{self.op} {self.direction}, estimated with no TPU (origin: model)"

    def part(self, rows: "list[BenchRow]") -> Any:
        """One case on one chip, for a terminal."""
        from rich.console import Group
        from rich.text import Text

        heading = Text(f"\n{rows[0].case} on {rows[0].chip}", style="cyan")
        return Group(heading, self._table(rows))

    def _table(self, rows: "list[BenchRow]") -> Any:
        """The implementations of one case on one chip."""
        from rich.table import Table

        table = Table("", "time", "error", "vs XLA", "cycles", "bound", box=None, pad_edge=False)
        for row in rows:
            if row.estimate is None or row.time_s is None:
                table.add_row(row.implementation, "—", row.why_not)
                continue
            found, speedup = row.estimate, self.speedup(row)
            busiest = sorted(found.utilisation.items(), key=lambda item: -item[1])[:2]
            used = ", ".join(f"{unit} {share:.0%}" for unit, share in busiest)
            table.add_row(
                row.implementation,
                format_time(row.time_s),
                found.band if found.calls else "",
                "" if speedup is None else f"{speedup:.2f}x",
                f"{found.cycles:,.0f}" if found.calls else "",
                f"{found.bound} ({used})" if found.calls else "",
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
    found: Callable[[KernelBench], None] | None = None,
    use_cache: bool = True,
) -> KernelBench:
    """Time an op on generations nobody has at hand.

    Args:
        op: What to time.
        chips: Generations, e.g. ("v5e", "v6e").
        cases: Shapes; by default the op's own.
        direction: "backward" times the gradient, with the forward pass it needs.
        implementations: By default the kernel and those that XLA alone makes.
        values: Of integer arguments that decide what a kernel does, such as group sizes; by default
            the op's own.
        progress: Called with each row's name before it is compiled.
        found: Called with the rows of each case and generation as soon as they are there.
        use_cache: Whether an answer on disk will do, and this one is kept.

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
            if found is not None:
                found(KernelBench(op.name, direction, tuple(rows[-len(wanted) :])))
    return KernelBench(op.name, direction, tuple(rows))


def default_implementations(op: Op) -> list[str]:
    """The kernel, and what XLA alone makes."""
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
    """Estimate one case of an op on a generation, with the blocks it would take or these.

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
    """The kind of kernel whose measured errors hold for an op."""
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
        found = estimate(
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
    return BenchRow(case.name, chip, implementation, found)
