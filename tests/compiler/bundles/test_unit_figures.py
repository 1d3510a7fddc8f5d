"""The core of each generation beside what the compiler's dumps state of it."""

import csv
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
ROWS = list(csv.DictReader((DATA / "compiler_latencies.csv").read_text("utf-8").splitlines()))
CORES = tomllib.loads((files("tpukit.compiler.bundles") / "data" / "units.toml").read_text())


@pytest.mark.parametrize("chip", CORES)
def test_slots_are_the_capacity_that_a_utilization_dump_states(chip):
    head = (DATA / f"looped_{chip}_units.txt").read_text().splitlines()[1:3]
    names, counts = re.split(r",\s*", head[0].strip()), map(int, head[1].split())
    stated = dict(zip(names, counts, strict=True))
    assert CORES[chip]["slots"] == {name: stated[name] for name in CORES[chip]["slots"]}


@pytest.mark.parametrize("chip", CORES)
def test_latencies_and_spacings_are_those_read_from_critical_paths(chip):
    read = {row["figure"]: int(row["cycles"]) for row in ROWS if row["chip"] == chip}
    shipped = {}
    for name, value in CORES[chip].items():
        if name != "slots" and isinstance(value, dict):
            shipped |= {f"{name}.{kind}": cycles for kind, cycles in value.items()}
        elif name != "slots" and not isinstance(value, bool):
            shipped[name] = value
    assert shipped == read
    assert all(row["source"] and row["date"] for row in ROWS)
