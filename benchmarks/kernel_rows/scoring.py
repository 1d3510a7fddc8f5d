"""How good estimates are: rank and error per device and op, and which implementation is faster."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scipy.stats import spearmanr

from kernel_rows.rows import Row

LEAST_SPEARMAN, MOST_ERROR, LEAST_NAMED = 0.9, 0.25, 0.9
# Five ranks with two neighbours swapped correlate by 0.9, as floats by 0.8999999999999998.
RANK_DIGITS = 9
LEAST_SHAPES = 5  # fewer say nothing of a rank, and leave a fit without the shape little to go by


@dataclass(frozen=True)
class Estimated:
    """A measured row with its estimate."""

    row: Row
    estimate_us: float

    @property
    def error(self) -> float:
        """How far the estimate is off, as a share of the measured time."""
        return abs(self.estimate_us / self.row.measured_us - 1)


@dataclass(frozen=True)
class Score:
    """Rank and error over some rows."""

    device: str
    op: str
    impl: str
    rows: int
    shapes: int
    spearman: float | None
    median_error: float

    @property
    def bars_met(self) -> bool | None:
        """Whether both bars are met; None with too few shapes to say."""
        if self.shapes < LEAST_SHAPES or self.spearman is None:
            return None
        rank = round(self.spearman, RANK_DIGITS)
        return rank >= LEAST_SPEARMAN and self.median_error <= MOST_ERROR

    def to_dict(self) -> dict[str, Any]:
        """Every field, and the verdict."""
        return asdict(self) | {"bars_met": self.bars_met}

    def __str__(self) -> str:
        rank = "    -" if self.spearman is None else f"{self.spearman:5.3f}"
        verdict = {True: "met", False: "MISSED", None: f"not judged: {self.shapes} shapes"}
        return (
            f"{self.device:<6} {self.op:<33} {self.impl:<21} {self.rows:5d} rows"
            f" {self.shapes:4d} shapes   Spearman {rank}   median error {self.median_error:6.1%}"
            f"   {verdict[self.bars_met]}"
        )


@dataclass(frozen=True)
class Naming:
    """How often the faster of Pallas and XLA was named right."""

    device: str
    op: str
    compared: int
    right: int

    def to_dict(self) -> dict[str, Any]:
        """Every field, and the share."""
        return asdict(self) | {"share": self.right / self.compared}

    def __str__(self) -> str:
        share = self.right / self.compared
        met = "met" if share >= LEAST_NAMED else "MISSED"
        counts = f"{self.right:4d} of {self.compared:<4d} {share:6.1%}"
        return f"{self.device:<6} {self.op:<33} {counts}   {met}"


def scores(rows: Iterable[Estimated], *, by_impl: bool = False) -> list[Score]:
    """One score for each device and op, or for each implementation of it too."""
    groups: dict[tuple[str, str, str], list[Estimated]] = defaultdict(list)
    for one in rows:
        impl = one.row.impl if by_impl else ""
        groups[one.row.device, one.row.op, impl].append(one)
    return [_score(*key, members) for key, members in sorted(groups.items())]


def _score(device: str, op: str, impl: str, members: Sequence[Estimated]) -> Score:
    shapes = len({one.row.shape_key for one in members})
    pairs = [(one.estimate_us, one.row.measured_us) for one in members]
    rank = float(spearmanr(*zip(*pairs, strict=True)).statistic) if shapes > 2 else None
    median = statistics.median(one.error for one in members)
    return Score(device, op, impl, len(members), shapes, rank, median)


def namings(rows: Iterable[Estimated]) -> list[Naming]:
    """Pallas against XLA wherever one device was measured with both on the same arguments.

    Each side is its fastest row: what a library that had both would run.
    """
    cases: dict[str, list[Estimated]] = defaultdict(list)
    for one in rows:
        cases[one.row.comparison_key].append(one)
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for members in cases.values():
        sides = [
            [one for one in members if one.row.impl.startswith(side)] for side in ("pallas", "xla")
        ]
        if not all(sides):
            continue
        measured = [min(one.row.measured_us for one in side) for side in sides]
        estimated = [min(one.estimate_us for one in side) for side in sides]
        count = counts[members[0].row.device, members[0].row.op]
        count[0] += 1
        count[1] += (measured[0] < measured[1]) == (estimated[0] < estimated[1])
    named = [Naming(*key, *count) for key, count in sorted(counts.items())]
    for device in sorted({one.device for one in named}):
        own = [one for one in named if one.device == device]
        named.append(Naming(device, "all", sum(o.compared for o in own), sum(o.right for o in own)))
    return named
