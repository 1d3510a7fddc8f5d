"""Columns of numbers from lines, with Python's own json and float as the reference."""

import json
import math

import numpy as np
import pytest

from tpukit.observe.runs.growing_file import Piece
from tpukit.observe.runs.series import RecordsTable

# With the number that each of them is in a column.
ODD_VALUES = {
    str(2**64): 2.0**64,
    str(-(2**63) - 1): -(2.0**63),
    "123456789012345678901234567890": float(123456789012345678901234567890),
    "9" * 400: math.nan,
    "1e999": math.inf,
    "-Infinity": -math.inf,
    "NaN": math.nan,
    "null": math.nan,
    "true": 1.0,
    "1e-400": 0.0,
    '"x"': math.nan,
    '{"a": 1}': math.nan,
    "[" * 150 + "]" * 150: math.nan,
}
DAMAGED = (
    *(b"", b"{", b"\xff", b"null", b"[1]", b'{"step": 2, "loss": 01}'),
    b'{"step": 2, "loss": "\\ud800"}',
    b'{"step": 2, "loss": ' + b"[" * 300 + b"]" * 300 + b"}",
)


def table_of(*lines):
    table = RecordsTable()
    table.add(Piece(0, b"".join(line + b"\n" for line in lines), len(lines)))
    return table


def line(step, loss="0.5"):
    return f'{{"step": {step}, "loss": {loss}}}'.encode()


@pytest.mark.parametrize(("value", "number"), ODD_VALUES.items(), ids=lambda one: str(one)[:24])
def test_an_odd_value_changes_no_other(value, number):
    step, loss = table_of(line(1), line(2, value), line(3)).columns("step", "loss")
    assert step.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(loss, [0.5, number, 0.5])


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda one: repr(one[:24]))
def test_a_damaged_line_is_passed_over_and_counted(damaged):
    table = table_of(line(1), damaged, line(3))
    assert table.columns("step")[0].tolist() == [1, 3]
    table.add(Piece(2, line(4) + b"\n", 1))  # the third line is gone from the file
    assert table.columns("step")[0].tolist() == [1, 4]
    table.add(Piece(1, b"", 0))
    assert table.columns("step")[0].tolist() == [1]


def test_the_last_of_equal_names_counts():
    assert table_of(b'{"step": 1, "loss": 1, "step": 2}').columns("step", "loss") == [[2], [1]]


def test_lines_of_several_sets_of_names_keep_their_order():
    records = [{"step": at, "eval" if at % 3 == 0 else "loss": at / 7} for at in range(50)]
    table = table_of(*(json.dumps(record).encode() for record in records))
    assert table.columns("step")[0].tolist() == list(range(50))
    assert table.columns("eval")[0].tolist() == [at / 7 for at in range(0, 50, 3)]
