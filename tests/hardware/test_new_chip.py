"""One data file adds a chip: it is listed, planned for and estimated, and no code names it."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from tpukit.errors import ConfigError, SliceError
from tpukit.hardware.catalog import generation_names, read_chip

SOURCE = Path(__file__).parents[2] / "src" / "tpukit"
SHIPPED = (files("tpukit.hardware") / "data" / "chips" / "v6e.toml").read_text("utf-8")
ASK = """
import json
from tpukit import plan
from tpukit.hardware import Slice, get_chip, list_slices, public_prices
from tpukit.hardware.rates import ChipRates
from tpukit.hardware.tables import GenerationListing
from tpukit.planner.cost.candidates import GENERATIONS
from tpukit.planner.memory_optimizer import MemoryOptimizer

found = plan("llama3.1-8b", tokens="1B", on="v9z", verify=0)
print(json.dumps({
    "listed": [chip.name for chip in GenerationListing.of(public_prices()).chips],
    "slices": [str(target) for target in list_slices("v9z")],
    "alias": get_chip("made up").name,
    "considered": GENERATIONS,
    "efficiency": ChipRates.of("v9z").matrix_efficiency,
    "price": public_prices().quote(Slice.parse("v9z-8")).value,
    "planned": str(found.best.job.slice),
    "estimate": MemoryOptimizer().estimate_memory(
        "llama3.1-8b", 8, 4096, chips=8, generation="v9z"
    ).to_dict(),
}))
"""


def invented_chip() -> str:
    """Return v6e's file under another name, with a rate and a price of its own."""
    text = re.sub(r'(?m)^(name|slice_prefix) = "v6e"', r'\1 = "v9z"', SHIPPED)
    text = re.sub(r"(?m)^aliases = .*", 'aliases = ["made-up"]', text)
    text = re.sub(r"(?m)^device_kinds = .*", 'device_kinds = ["TPU v9 made"]', text)
    text = text.replace("generation = 6\n", "generation = 9\n", 1)
    text = text.replace('libtpu_name = "v6e"\n', "")
    text = text.replace(
        "\nmatrix_efficiency = { value = 0.85", "\nmatrix_efficiency = { value = 0.5"
    )
    return (
        text
        + """
[prices]
source = "an invented list"
date = "2026-11-18"
rates = [{ region = "us-east5", on_demand = 9.75, zones = ["us-east5-b"] }]
"""
    )


def test_a_data_file_alone_adds_a_chip(tmp_path):
    (tmp_path / "v9z.toml").write_text(invented_chip())
    environment = {**os.environ, "TPUKIT_CHIPS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["listed"][-1] == "v9z"
    assert answer["slices"][0] == "v9z-1"
    assert answer["alias"] == "v9z"
    assert "v9z" in answer["considered"]
    assert answer["efficiency"] == 0.5
    assert answer["price"] == 9.75
    assert answer["planned"].startswith("v9z-")
    assert answer["estimate"]["chips"] == 8
    assert max(gb for name, gb in answer["estimate"].items() if name.endswith("_gb")) > 1


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("name = ", ConfigError, "not valid TOML"),
        ('name = "v9z"', ConfigError, "lacks"),
        (SHIPPED.replace("clock_ghz = ", "clock = "), SliceError, "clock_ghz"),
    ],
)
def test_a_damaged_chip_file_is_refused(text, error, match):
    with pytest.raises(error, match=match):
        read_chip(text, "v9z.toml")


# Where a chip's name may appear in a string that is no docstring, help text or message, and why.
ALLOWED = {
    "job/sections.py": "constants that documents name (TPUVersion.V5P)",
    "torch/config.py": "two settings of document 002 that have a chip in their name",
}
NAME = re.compile(rf"^(tpu)?({'|'.join(generation_names())}|v7|v5litepod|v7x)([-:][0-9x]+)?$")


def test_no_code_outside_the_catalog_decides_by_a_chip_name():
    named: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE)
        if room.parts[0] == "hardware":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and NAME.match(text):
                named.setdefault(room.as_posix(), set()).add(text)
    unexpected = {file: names for file, names in named.items() if file not in ALLOWED}
    assert not unexpected, "ask the catalog (hardware/catalog.py) instead of naming a chip"
    assert {*ALLOWED} <= {*named}, "an entry of the allow list that nothing needs any more"
