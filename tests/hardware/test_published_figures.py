"""Every figure of the catalog beside what its source states, in the source's own units."""

import csv
import json
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest
from jax_names import tpu_info

from tpukit.hardware.catalog import generation_names

CHIPS = Path(__file__).parent / "data" / "published_chips.csv"
ROWS = list(csv.DictReader(CHIPS.read_text("utf-8").splitlines()))
PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "data" / "published_results.json"
STEP_MFU = "measured_step_mfu_"
SCALE = {"": 1, "GiB": 1, "TFLOP/s": 1, "GB/s": 1, "Gbit/s": 1 / 8, "MHz": 1e-3, "GB": 1e9}


@dataclass(frozen=True)
class Stated:
    """A number of a data file."""

    value: float
    source: str


def catalog(name):
    content = tomllib.loads(
        (files("tpukit.hardware") / "data" / "chips" / f"{name}.toml").read_text()
    )
    measured = {f"measured_{key}": entry for key, entry in content.get("measured", {}).items()}
    return {
        key: Stated(entry["value"], entry["source"])
        for key, entry in {**content["peak_tflops"], **content["figures"], **measured}.items()
        if "value" in entry
    }


CATALOG = {name: catalog(name) for name in generation_names()}
IN_JAX = [
    name for name in generation_names() if name in [one.value for one in tpu_info().ChipVersion]
]


def of_jax(name):
    """What jax states of a generation, a core at a time, for the whole chip."""
    table = tpu_info()
    version = table.ChipVersion(name)
    cores = version.num_physical_tensor_cores_per_chip
    info = table._get_tpu_info_impl(version, cores)
    sparse = info.sparse_core.num_cores if info.sparse_core else 0
    sparse *= 1 if version.supports_megacore else cores
    return {
        "bf16": info.bf16_ops_per_second * cores / 1e12,
        "int8": info.int8_ops_per_second * cores / 1e12,
        "fp8": info.fp8_ops_per_second * cores / 1e12,
        "int4": info.int4_ops_per_second * cores / 1e12,
        "hbm_bytes": info.hbm_capacity_bytes * cores,
        "hbm_gbps": info.mem_bw_bytes_per_second * cores / 1e9,
        "vmem_bytes": info.vmem_capacity_bytes,
        "smem_bytes": info.smem_capacity_bytes,
        "cmem_bytes": info.cmem_capacity_bytes * cores,
        "sublanes": info.num_sublanes,
        "lanes": info.num_lanes,
        "mxus_per_core": info.num_mxus,
        "mxu_size": info.mxu_column_size,
        "sparse_cores": sparse,
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['chip']}-{row['figure']}")
def test_a_figure_is_what_its_source_states(row):
    scale = 2**30 if row["figure"] == "hbm_bytes" else SCALE[row["unit"]]
    stated = float(row["stated"]) * scale / float(row["per"])
    # A source that rounds to three digits, or divides what was rounded, is met to three digits.
    within = float(row["within"] or 2e-3)
    assert CATALOG[row["chip"]][row["figure"]].value == pytest.approx(stated, rel=within)
    assert row["source"]
    assert row["date"] >= "2025-01-01"


@pytest.mark.parametrize("name", IN_JAX)
def test_figures_taken_from_jax_are_those_of_the_jax_that_is_installed(name):
    stated, read_elsewhere = of_jax(name), {row["figure"] for row in ROWS if row["chip"] == name}
    for figure, own in CATALOG[name].items():
        if own.source == "tpu_info" and figure not in read_elsewhere:
            assert own.value == pytest.approx(stated[figure], rel=1e-6), figure


@pytest.mark.parametrize("name", IN_JAX)
def test_figures_of_other_sources_are_near_those_of_jax(name):
    """Two sources that disagree by more are named in the data file's note."""
    disputed = {("v3", "bf16"), ("v3", "hbm_gbps"), ("v4", "int8"), ("v5p", "hbm_gbps")}
    for figure, stated in of_jax(name).items():
        own = CATALOG[name].get(figure)
        if own is not None and stated and (name, figure) not in disputed:
            room = 0.075 if figure == "hbm_bytes" else 0.03  # where jax counts GB, others GiB
            assert own.value == pytest.approx(stated, rel=room), figure


@pytest.mark.parametrize("name", generation_names())
def test_no_figure_is_without_a_published_row(name):
    rows = {row["figure"] for row in ROWS if row["chip"] == name}
    jax = {figure for figure, own in CATALOG[name].items() if own.source == "tpu_info"}
    steps = {figure for figure in CATALOG[name] if figure.startswith(STEP_MFU)}
    assert set(CATALOG[name]) - steps == rows | jax


def test_measured_figures_are_those_of_the_published_file():
    content = json.loads(PUBLISHED.read_text())["microbenchmark_calibration"]
    published = json.dumps(content)
    for chip, figures in CATALOG.items():
        for name, own in figures.items():
            if name.startswith("measured_") and not name.startswith(STEP_MFU):
                assert f"{own.value:g}" in published, (chip, name)


def published_mfu(chip, peak):
    """MFU of every published step on a chip whose products have this peak, by the step's id."""
    peaks = CATALOG[chip]
    return {
        row["id"]: row["derived"]["mfu_causal_norm"] * peaks["bf16"].value / peaks[peak].value
        for row in json.loads(PUBLISHED.read_text())["results"]
        if row["hardware"]["gen"] == chip
        and (row.get("quantization") or "bf16").startswith(peak)
        and row["derived"].get("mfu_causal_norm")
    }


@pytest.mark.parametrize("chip", generation_names())
def test_the_best_step_of_a_chip_is_the_best_that_was_published(chip):
    stated = {name: own for name, own in CATALOG[chip].items() if name.startswith(STEP_MFU)}
    for peak in ("bf16", "int8", "fp8"):
        known = published_mfu(chip, peak) if peak in CATALOG[chip] else {}
        assert (STEP_MFU + peak in stated) == bool(known)
        if known:
            assert stated[STEP_MFU + peak].value == pytest.approx(max(known.values()), abs=1e-4)
