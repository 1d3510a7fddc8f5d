"""Records of a JSON-lines file as columns of numbers, one table for each set of names.

Training steps, evaluations and steps whose loss is not finite write different names. Each set has a
table of its own, so that a metric which a line does not speak of is no gap in its series.
"""

import threading
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
import orjson
from pydantic_core import from_json  # three times as fast as json.loads

from .growing_file import Piece

# Parsed lines take tens of times their bytes: threads that read several files take turns.
PARSING = threading.Lock()
# pydantic_core refuses values nested deeper than 200, which takes more brackets than these.
FEW_BRACKETS = 100
Column = np.ndarray[tuple[int], np.dtype[np.float64]]
Rows = np.ndarray[Any, np.dtype[np.int64]]


class RecordsTable:
    """Columns that grow by records, and shrink when a file was rolled back."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, ...], _Table] = {}

    def names(self) -> list[str]:
        """Every name that stands for a number somewhere, in the order they came."""
        return list(dict.fromkeys(name for table in self._tables.values() for name in table.names))

    def columns(self, *names: str) -> list[Column]:
        """Return columns side by side, from the records that have all of these names, in order."""
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
        """Forget the lines from `rows` on."""
        for table in self._tables.values():
            table.cut(rows)

    def add(self, piece: Piece) -> None:
        """Take in a piece of the file, and forget the lines that are gone from the file."""
        self.cut(piece.keep)
        groups: dict[tuple[str, ...], tuple[list[Rows], list[dict[str, Any]]]] = {}
        row = piece.keep
        # No Python runs per line: consecutive lines nearly always have the same names.
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
    """Records of one set of names: a growing array for each, and the numbers of their lines."""

    def __init__(self, names: tuple[str, ...], example: Mapping[str, Any]) -> None:
        self.names = tuple(name for name in names if _may_be_number(example[name]))
        self._is_pure = self.names == names
        self._columns = [np.empty(0) for _ in self.names]
        self._rows = np.empty(0, np.int64)
        self._length = 0

    def add(self, rows: Rows, records: list[dict[str, Any]]) -> None:
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

    def _block(self, records: list[dict[str, Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        if self._is_pure:
            try:
                values = chain.from_iterable(map(dict[str, Any].values, records))
                shape = len(records), len(self.names)
                return np.fromiter(values, np.float64, shape[0] * shape[1]).reshape(shape)
            except (TypeError, ValueError, OverflowError):
                pass  # some of them are no numbers after all
        values = [[as_number(record[name]) for name in self.names] for record in records]
        return np.array(values, dtype=np.float64).reshape(len(records), len(self.names))


def _grown(array: Any, used: int, capacity: int) -> Any:
    # Memory that is not written to yet costs nothing but addresses.
    larger = np.empty(capacity, array.dtype)
    larger[:used] = array[:used]
    return larger


def _may_be_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def parse_records(lines: Sequence[bytes]) -> list[dict[str, Any] | None]:
    """Return the object of each line; None for a line that holds none.

    All at once is faster than one by one, and works unless one of them is damaged.
    """
    try:
        parsed = from_json(b"[" + b",".join(lines) + b"]", cache_strings="keys")
        if len(parsed) != len(lines):
            raise ValueError("a line holds more than one value")
    except ValueError:
        parsed = [_parse(line) for line in lines]
    return [one if isinstance(one, dict) else None for one in parsed]


def _parse_numbers(piece: Piece) -> list[dict[str, Any]]:
    """Return the object of each line, empty for a line without one, for use as numbers.

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
    return [record or {} for record in parse_records(piece.lines)]


def _parse(line: bytes) -> Any:
    try:
        return from_json(line)
    except ValueError:
        return None


def as_number(value: Any) -> float:
    """Return a value as a number; NaN for everything that is none."""
    if not isinstance(value, int | float):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("nan")
