"""Rates that were read off programs, books and standards stand beside what was read."""

import statistics
import tomllib
from pathlib import Path

import pytest

from tpukit.hardware.rates import rates_file

ROWS = tomllib.loads((Path(__file__).parent / "data" / "rate_rows.toml").read_text())["row"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["rate"])
def test_a_rate_is_the_mean_of_what_was_read(row):
    section, name, generation = row["rate"].split(".")
    shipped = rates_file()[section][name][generation]["value"]
    read = statistics.fmean(row["rows"])
    assert abs(shipped / read - 1) <= row["within"] + 1e-9
    assert row["source"]
    assert row["date"] >= "2025-01-01"
