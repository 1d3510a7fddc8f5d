"""Compare estimates with measured kernels: rank correlation, error, and which side is faster."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from tpukit.shown import Shown

from .rows import MeasuredRow, RowLeftOut

LONGEST_REASON = 160
MOST_PROGRAMS = 4


def score_view(score: "TimingsScore") -> Any:
    """Return a view of scores by op and generation, of fitted rows, and of rows left out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    sample = "" if score.sampled is None else f", at most {score.sampled} cases of each group"
    parts: list[Any] = [
        Text("Estimated (origin: model) against measured kernels", style="bold"),
        Text(
            f"{len(score.scored)} of {score.rows_in_file} rows of {score.source}{sample}; each "
            "compiled for its chip, which is not here, and timed as `tpukit kernel bench` does.\n"
        ),
    ]
    table = Table(box=None, pad_edge=False)
    for heading in ("op", "chip"):
        table.add_column(heading)
    for heading in ("rows", "in view", "Spearman", "median error", "mean error", "in band",
                    "faster named"):  # fmt: skip
        table.add_column(heading, justify="right")
    for group in (*score.groups, *score.totals):
        table.add_row(*(Text(cell) for cell in _cells(group)))
    parts += [table, Text(_in_view(score))]
    for reason, programs in score.reasons.items():
        shown = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}…"
        most = [name for name, _ in programs.most_common(MOST_PROGRAMS)]
        named = ", ".join([*most, "…"] if len(programs) > len(most) else most)
        parts.append(Text(f"left out {programs.total()}: {shown} ({named})", style="yellow"))
    return Group(*parts)


def _cells(group: "GroupScore") -> list[str]:
    return [
        group.op,
        group.chip,
        str(group.rows),
        str(group.in_view),
        "—" if group.spearman is None else f"{group.spearman:.3f}",
        f"{group.median_error:.1%}",
        f"{group.mean_error:.1%}",
        _share(group.in_band, group.banded),
        _share(group.named_right, group.compared),
    ]


def _share(part: int, total: int) -> str:
    return f"{part} of {total}" if total else "—"


def _in_view(score: "TimingsScore") -> str:
    """Return how many rows the constants were fitted on, and the scores without them."""
    seen = [row for row in score.scored if row.in_view]
    kernels = sum(row.row.is_pallas for row in seen)
    said = (
        f"\nIn view when constants were chosen: {kernels} Pallas rows (the rates of kernels, "
        f"calibration.toml) and {len(seen) - kernels} others (the rates of XLA's ops, "
        "fitted_on.toml)."
    )
    rest = score.total_unseen
    if rest is None:
        return f"{said} No row was left aside."
    return (
        f"{said} The other {rest.rows}: median error {rest.median_error:.1%}, mean "
        f"{rest.mean_error:.1%}, faster named {_share(rest.named_right, rest.compared)}.\n"
    )


LEAST_ROWS_FOR_RANK = 3
ALL = "all"


@dataclass(frozen=True)
class ScoredRow:
    """A measured row with its estimate.

    Attributes:
        row: The measured row.
        chip: The generation by tpukit's name.
        kind: The kernel kind whose rates timed it; None for plain XLA.
        estimate_us: The estimate, of origin `model`.
        low_us: Lower end of the band that `tpukit kernel bench` prints; None without one.
        high_us: Upper end of that band.
        in_view: Whether the row was known when the constants of its estimate were chosen.
    """

    row: MeasuredRow
    chip: str
    kind: str | None
    estimate_us: float
    low_us: float | None
    high_us: float | None
    in_view: bool

    @property
    def ratio(self) -> float:
        """The estimate over the measured time."""
        return self.estimate_us / self.row.measured_us

    @property
    def error(self) -> float:
        """The relative error of the estimate."""
        return abs(self.ratio - 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {
            "id": self.row.id,
            "op": self.row.op,
            "impl": self.row.impl,
            "chip": self.chip,
            "kind": self.kind,
            "measured_us": self.row.measured_us,
            "estimate_us": round(self.estimate_us, 3),
            "low_us": self.low_us,
            "high_us": self.high_us,
            "in_view": self.in_view,
        }


@dataclass(frozen=True)
class GroupScore:
    """Scores of one op on one generation, over all its implementations.

    Attributes:
        op: The op.
        chip: The generation.
        rows: Number of rows.
        cases: Number of different arguments among the rows.
        in_view: Rows that were known when constants were chosen.
        spearman: Rank correlation of estimated and measured times; None for too few rows.
        median_error: Median of the relative errors.
        mean_error: Mean of the relative errors.
        banded: Rows whose estimate has an error band.
        in_band: Rows with a measured time in that band.
        compared: Cases in which Pallas and XLA were both measured and estimated.
        named_right: Compared cases in which the estimate names the faster one.
    """

    op: str
    chip: str
    rows: int
    cases: int
    in_view: int
    spearman: float | None
    median_error: float
    mean_error: float
    banded: int
    in_band: int
    compared: int
    named_right: int

    @classmethod
    def of(cls, op: str, chip: str, rows: Sequence[ScoredRow]) -> "GroupScore":
        """Score at least one row."""
        banded = [
            row.low_us <= row.row.measured_us <= row.high_us
            for row in rows
            if row.low_us is not None and row.high_us is not None
        ]
        named = name_faster(rows)
        return cls(
            op=op,
            chip=chip,
            rows=len(rows),
            cases=len({row.row.case_key for row in rows}),
            in_view=sum(row.in_view for row in rows),
            spearman=_spearman(rows),
            median_error=statistics.median(row.error for row in rows),
            mean_error=statistics.fmean(row.error for row in rows),
            banded=len(banded),
            in_band=sum(banded),
            compared=len(named),
            named_right=sum(named),
        )


@dataclass(frozen=True)
class TimingsScore(Shown):
    """tpukit's estimates beside measured kernels.

    Attributes:
        source: The file of measured rows.
        rows_in_file: How many rows it has.
        sampled: Cases per op and generation; None for all.
        scored: Rows with an estimate.
        left_out: Rows without an estimate.
    """

    source: str
    rows_in_file: int
    sampled: int | None
    scored: tuple[ScoredRow, ...]
    left_out: tuple[RowLeftOut, ...]

    @cached_property
    def groups(self) -> tuple[GroupScore, ...]:
        """A score for each op on each generation."""
        return _groups(self.scored)

    @cached_property
    def total(self) -> GroupScore | None:
        """The score of all rows; None without any."""
        return _together(ALL, self.scored)

    @cached_property
    def totals(self) -> tuple[GroupScore, ...]:
        """Scores of all Pallas kernels, of all XLA programs, and of all rows."""
        sides = {
            f"{ALL} Pallas": [row for row in self.scored if row.row.is_pallas],
            f"{ALL} XLA": [row for row in self.scored if row.row.is_xla],
            ALL: self.scored,
        }
        together = (_together(name, rows) for name, rows in sides.items())
        return tuple(total for total in together if total is not None)

    @cached_property
    def unseen(self) -> tuple[ScoredRow, ...]:
        """The rows that were not known when constants were chosen."""
        return tuple(row for row in self.scored if not row.in_view)

    @cached_property
    def total_unseen(self) -> GroupScore | None:
        """The score of the unseen rows; None without any."""
        return _together(ALL, self.unseen)

    @cached_property
    def reasons(self) -> dict[str, Counter[str]]:
        """Why rows were left out, the most frequent first, with the number per program."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for row in self.left_out:
            counts[row.reason][row.what] += 1
        return dict(sorted(counts.items(), key=lambda item: -item[1].total()))

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as plain data."""
        return {
            "compares": {"estimate": "model", "measured": "measured"},
            "source": self.source,
            "rows_in_file": self.rows_in_file,
            "cases_sampled": self.sampled,
            "totals": [asdict(total) for total in self.totals],
            "total_not_in_view": self.total_unseen and asdict(self.total_unseen),
            "groups": [asdict(group) for group in self.groups],
            "groups_not_in_view": [asdict(group) for group in _groups(self.unseen)],
            "rows": [row.to_dict() for row in self.scored],
            "left_out": [asdict(row) for row in self.left_out],
        }

    def __rich__(self) -> Any:
        return score_view(self)


def name_faster(rows: Iterable[ScoredRow]) -> list[bool]:
    """Return whether the faster of Pallas and XLA is named right, for cases with both.

    Each side counts by its fastest row, which a library with both would run.
    """
    cases: dict[str, list[ScoredRow]] = defaultdict(list)
    for row in rows:
        cases[row.row.case_key].append(row)
    named: list[bool] = []
    for case in cases.values():
        pallas = [row for row in case if row.row.is_pallas]
        xla = [row for row in case if row.row.is_xla]
        if not pallas or not xla:
            continue
        measured = _fastest_us(pallas) < _fastest_us(xla)
        estimated = min(row.estimate_us for row in pallas) < min(row.estimate_us for row in xla)
        named.append(measured == estimated)
    return named


def _fastest_us(rows: Iterable[ScoredRow]) -> float:
    return min(row.row.measured_us for row in rows)


def _groups(rows: Iterable[ScoredRow]) -> tuple[GroupScore, ...]:
    members: dict[tuple[str, str], list[ScoredRow]] = defaultdict(list)
    for row in rows:
        members[row.row.op, row.chip].append(row)
    return tuple(GroupScore.of(*key, members[key]) for key in sorted(members))


def _together(name: str, rows: Sequence[ScoredRow]) -> GroupScore | None:
    """Score different ops together, without a rank, which would only compare op sizes."""
    return replace(GroupScore.of(name, ALL, rows), spearman=None) if rows else None


def _spearman(rows: Sequence[ScoredRow]) -> float | None:
    """Return the rank correlation; None for too few rows, or where one side is constant."""
    estimated = [row.estimate_us for row in rows]
    measured = [row.row.measured_us for row in rows]
    if len(rows) < LEAST_ROWS_FOR_RANK or 1 in (len(set(estimated)), len(set(measured))):
        return None
    from scipy.stats import spearmanr

    correlation: Any = spearmanr(estimated, measured)
    return float(correlation.statistic)
