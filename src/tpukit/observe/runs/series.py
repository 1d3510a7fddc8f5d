"""Metrics as columns of numbers, and series of them thinned for a screen with extremes kept.

Training steps, evaluations and steps whose loss is not finite write records with different names.
Each set of names has a table of its own, so that a metric that is not in a line makes no gap.
"""

import threading
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Literal

import numpy as np
import orjson

from ...plain_data import JsonMapping, JsonObject
from ...records.lines import parse_lines
from ...shown import Shown
from .growing_file import Piece

# Parsed lines take tens of times their bytes, so threads parse one file at a time.
PARSING = threading.Lock()
# pydantic_core refuses values nested deeper than 200, which takes more brackets than these.
FEW_BRACKETS = 100
Column = np.ndarray[tuple[int], np.dtype[np.float64]]
Rows = np.ndarray[Any, np.dtype[np.int64]]


class RecordsTable:
    """Columns of numbers: records add rows, and a rollback of the file removes rows."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, ...], _Table] = {}

    def names(self) -> list[str]:
        """Return every name that has a number in some record, in order of appearance."""
        return list(dict.fromkeys(name for table in self._tables.values() for name in table.names))

    def columns(self, *names: str) -> list[Column]:
        """Return the columns of these names, from the records that have all of them."""
        having = [table for table in self._tables.values() if set(names) <= set(table.names)]
        if not having:
            return [np.empty(0) for _ in names]
        if len(having) == 1:
            return [having[0].column(name) for name in names]
        order = np.argsort(np.concatenate([table.rows() for table in having]), kind="stable")
        return [np.concatenate([table.column(name) for table in having])[order] for name in names]

    @property
    def loaded_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(table.loaded_bytes for table in self._tables.values())

    def cut(self, rows: int) -> None:
        """Discard the lines from `rows` on."""
        for table in self._tables.values():
            table.cut(rows)

    def add(self, piece: Piece) -> None:
        """Add a piece of the file, and discard the lines that are no longer in the file."""
        self.cut(piece.keep)
        groups: dict[tuple[str, ...], tuple[list[Rows], list[JsonObject]]] = {}
        row = piece.keep
        # Groups instead of a loop over lines, because consecutive lines nearly always have the same
        # names.
        for names, neighbours in groupby(_parse_numbers(piece), tuple):
            rows, records = groups.setdefault(names, ([], []))
            before = len(records)
            records += neighbours
            rows.append(np.arange(row, row + len(records) - before))
            row += len(records) - before
        groups.pop((), None)
        for names, (rows, records) in groups.items():
            if names not in self._tables:
                self._tables[names] = _Table(names, records[0])
            self._tables[names].add(np.concatenate(rows), records)


class _Table:
    """Records with one set of names: one growing array per name, and their line numbers."""

    def __init__(self, names: tuple[str, ...], example: JsonMapping) -> None:
        self.names = tuple(name for name in names if _may_be_number(example[name]))
        self._is_pure = self.names == names
        self._columns = [np.empty(0) for _ in self.names]
        self._rows = np.empty(0, np.int64)
        self._length = 0

    def add(self, rows: Rows, records: list[JsonObject]) -> None:
        block = self._block(records)
        begin, self._length = self._length, self._length + len(records)
        if self._length > len(self._rows):
            capacity = max(1024, self._length * 3 // 2)
            self._rows = _grown(self._rows, begin, capacity)
            self._columns = [_grown(column, begin, capacity) for column in self._columns]
        self._rows[begin : self._length] = rows
        for at, column in enumerate(self._columns):
            column[begin : self._length] = block[:, at]

    def column(self, name: str) -> Column:
        return self._columns[self.names.index(name)][: self._length]

    @property
    def loaded_bytes(self) -> int:
        return 8 * self._length * (1 + len(self.names))

    def rows(self) -> Rows:
        return self._rows[: self._length]

    def cut(self, rows: int) -> None:
        self._length = int(np.searchsorted(self.rows(), rows))

    def _block(self, records: list[JsonObject]) -> np.ndarray[Any, np.dtype[np.float64]]:
        if self._is_pure:
            try:
                values = chain.from_iterable(map(JsonObject.values, records))
                shape = len(records), len(self.names)
                return np.fromiter(values, np.float64, shape[0] * shape[1]).reshape(shape)
            except (TypeError, ValueError, OverflowError):
                pass  # some values are no numbers
        values = [[as_number(record[name]) for name in self.names] for record in records]
        return np.array(values, dtype=np.float64).reshape(len(records), len(self.names))


def _grown(array: Any, used: int, capacity: int) -> Any:
    # Memory that is not written to is not allocated.
    larger = np.empty(capacity, array.dtype)
    larger[:used] = array[:used]
    return larger


def _may_be_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _parse_numbers(piece: Piece) -> list[JsonObject]:
    """Return the object of each line, empty for a line without one.

    orjson takes half the time of pydantic_core, and returns integers of more than 64 bits as
    floats. It rejects NaN, Infinity and floats out of range, which pydantic_core then parses.
    """
    codes = np.frombuffer(piece.text, np.uint8)
    if np.count_nonzero((codes | 0x20) == ord("{")) <= piece.count + FEW_BRACKETS:  # "[" or "{"
        try:
            parsed = orjson.loads(b"[" + piece.text[:-1].replace(b"\n", b",") + b"]")
        except ValueError:
            parsed = []
        if len(parsed) == piece.count and set(map(type, parsed)) == {dict}:
            return parsed
    return [record or {} for record in parse_lines(piece.lines)]


def as_number(value: Any) -> float:
    """Return a value as a float; NaN for anything that is no number."""
    if not isinstance(value, int | float):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("nan")


Axis = Literal["step", "time"]
Numbers = np.ndarray[Any, np.dtype[np.float64]]
# A pause this many times longer than the usual distance of points is a gap.
GAP = 20


@dataclass(frozen=True)
class Series(Shown):
    """Points of one metric (origin: measured).

    Attributes:
        metric: Its name.
        by: Whether `x` is steps or unix seconds.
        x: In the order of the file.
        y: NaN where the value was not finite, or at a gap in time.
        total: Number of points between `start` and `end` before thinning.
    """

    metric: str
    by: Axis
    x: Numbers
    y: Numbers
    total: int

    def __len__(self) -> int:
        return len(self.x)

    def to_dict(self) -> JsonObject:
        """Return plain data; None is a gap."""
        return {
            "metric": self.metric,
            "by": self.by,
            "x": self.x.tolist(),
            "y": [value if np.isfinite(value) else None for value in self.y.tolist()],
            "total": self.total,
            "origin": "measured",
        }


def make_series(
    metric: str,
    x: Numbers,
    y: Numbers,
    *,
    by: Axis,
    points: int,
    start: float | None = None,
    end: float | None = None,
) -> Series:
    """Return a metric between `start` and `end`, thinned to at most `points` points.

    The points are divided into groups of neighbours. Each group keeps its least and greatest value
    at their places, and a gap if it has one, so that a spike of one step in ten million is visible.
    """
    low, high = -np.inf if start is None else start, np.inf if end is None else end
    inside = (x >= low) & (x <= high) & np.isfinite(x)  # points without a step or time are dropped
    if not inside.all():
        x, y = x[inside], y[inside]
    total = len(x)
    y = np.where(np.isfinite(y), y, np.nan)
    kept = thin(y, points)
    x, y = x[kept], y[kept]
    if by == "time":
        x, y = _with_gaps(x, y)
    return Series(metric, by, x, y, total)


def thin(y: Numbers, points: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the indices to keep: first, last, and the extremes and gaps of each group."""
    count, points = len(y), max(points, 8)
    if count <= points:
        return np.arange(count)
    missing = np.isnan(y)
    each = 3 if missing.any() else 2
    runs = (points - 2) // each
    width = -(-count // runs)
    even = count // width * width
    kept = [np.array([0, count - 1])]
    for begin, end in ((0, even), (even, count)):
        if end > begin:
            block = y[begin:end].reshape(-1, min(width, end - begin))
            gaps = missing[begin:end].reshape(block.shape)
            at = begin + np.arange(len(block)) * block.shape[1]
            kept.append(at + np.where(gaps, np.inf, block).argmin(axis=1))
            kept.append(at + np.where(gaps, -np.inf, block).argmax(axis=1))
            kept.append((at + gaps.argmax(axis=1))[gaps.any(axis=1)])
    return np.unique(np.concatenate(kept))


def _with_gaps(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    """Insert a NaN into every gap in time."""
    if len(x) < 3:
        return x, y
    apart = np.diff(x)
    silent = np.flatnonzero(apart > GAP * max(float(np.median(np.abs(apart))), 1.0))
    return (
        np.insert(x, silent + 1, (x[silent] + x[silent + 1]) / 2),
        np.insert(y, silent + 1, np.nan),
    )
