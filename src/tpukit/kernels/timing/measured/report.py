"""How estimates compare with measured kernels: rank, error, and which side is named the faster."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ....shown import Shown
from .rows import MeasuredRow, RowLeftOut

LEAST_ROWS_FOR_RANK = 3
ALL = "all"


@dataclass(frozen=True)
class ScoredRow:
    """A measured row beside its estimate.

    Attributes:
        chip: The generation by tpukit's name.
        kind: The kind of kernel whose rates timed it; None for what XLA alone makes.
        estimate_us: Origin `model`.
        low_us: The band that `tpukit kernel bench` prints; None where it prints none.
        high_us: Its upper end.
        in_view: Whether the row was in view when the constants of its estimate were chosen.
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
        """How far the estimate is off, as a share of the measured time."""
        return abs(self.ratio - 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
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
        cases: Different arguments among the rows.
        in_view: Rows that were in view when constants were chosen.
        spearman: Rank correlation of estimated and measured times; None for too few rows.
        median_error: Of the relative errors.
        mean_error: The same in the mean.
        banded: Rows whose estimate has an error band.
        in_band: Those of them whose measured time lies in it.
        compared: Cases in which Pallas and XLA were both measured and estimated.
        named_right: Those in which the faster of the two was named right.
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
        """Score some rows; there is at least one."""
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
    """Estimates of tpukit beside measured kernels: a model against measurements.

    Attributes:
        source: The file of measured rows.
        rows_in_file: How many it has.
        sampled: Cases taken of each op and generation; None for all.
        scored: Rows with an estimate.
        left_out: Rows without one.
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
        """Everything together; None where nothing was scored."""
        return _together(ALL, self.scored)

    @cached_property
    def totals(self) -> tuple[GroupScore, ...]:
        """All Pallas kernels, all that XLA makes, and everything; those that have rows."""
        sides = {
            f"{ALL} Pallas": [row for row in self.scored if row.row.is_pallas],
            f"{ALL} XLA": [row for row in self.scored if row.row.is_xla],
            ALL: self.scored,
        }
        together = (_together(name, rows) for name, rows in sides.items())
        return tuple(total for total in together if total is not None)

    @cached_property
    def unseen(self) -> tuple[ScoredRow, ...]:
        """The rows that were not in view when constants were chosen."""
        return tuple(row for row in self.scored if not row.in_view)

    @cached_property
    def total_unseen(self) -> GroupScore | None:
        """The score of those; None where there are none."""
        return _together(ALL, self.unseen)

    @cached_property
    def reasons(self) -> dict[str, Counter[str]]:
        """Why rows were left out, the most frequent first; how many of each program."""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for row in self.left_out:
            found[row.reason][row.what] += 1
        return dict(sorted(found.items(), key=lambda item: -item[1].total()))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
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
        from .view import score_view

        return score_view(self)


def name_faster(rows: Iterable[ScoredRow]) -> list[bool]:
    """Whether the faster of Pallas and XLA is named right, wherever a case has both.

    Each side is its fastest row: what a library that had both would run.
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
    """One score of different ops, without a rank: any model knows a small op from a large one."""
    return replace(GroupScore.of(name, ALL, rows), spearman=None) if rows else None


def _spearman(rows: Sequence[ScoredRow]) -> float | None:
    """Rank correlation; None for too few rows, or where one side does not differ at all."""
    estimated = [row.estimate_us for row in rows]
    measured = [row.row.measured_us for row in rows]
    if len(rows) < LEAST_ROWS_FOR_RANK or 1 in (len(set(estimated)), len(set(measured))):
        return None
    from scipy.stats import spearmanr

    found: Any = spearmanr(estimated, measured)
    return float(found.statistic)
