"""The catalog against independent truths: jax's own table, arithmetic, and the vendor's totals."""

import math
import tomllib
from importlib import resources

import jax_names
import pytest

from tpukit.errors import SliceError, TPUValidationError
from tpukit.hardware import Slice, get_chip, list_chips
from tpukit.hardware.catalog import chip_from, generation_names
from tpukit.hardware.figure import ORIGINS
from tpukit.kernels.blocks.tiling import tile_shape

TABLE = jax_names.tpu_info()

CHIPS = {chip.name: chip for chip in list_chips()}
IN_JAX = [name for name in generation_names() if name in [one.value for one in TABLE.ChipVersion]]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=str)
def test_every_figure_says_where_it_came_from(chip):
    for name, figure in chip.figures().items():
        if figure.value is None:
            assert len(figure.reason) > 10, name
        else:
            assert figure.origin in ORIGINS, name
            assert figure.source, name
            assert figure.date >= "2025-01-01", name
            assert math.isfinite(figure.value), name
            assert figure.value >= 0, name
    assert chip.structure_source
    assert chip.topology_source
    assert bool(chip.rules) != bool(chip.no_slices)


@pytest.mark.parametrize("name", IN_JAX)
def test_jax_knows_the_same_chip(name):
    """Within the 13 % by which the sources disagree, which the notes spell out."""
    version = TABLE.ChipVersion(name)
    chip = CHIPS[name]
    core = TABLE.get_tpu_info_for_chip(version, chip.cores_per_device)
    cores = version.num_physical_tensor_cores_per_chip
    assert cores == chip.cores_per_chip
    assert core.vmem_capacity_bytes == chip.vmem_bytes.value
    assert core.smem_capacity_bytes == chip.smem_bytes.value
    assert core.num_mxus == chip.mxus_per_core.value
    assert core.mxu_column_size == chip.mxu_size.value
    assert (core.num_sublanes, core.num_lanes) == (chip.sublanes.value, chip.lanes.value)
    assert core.hbm_capacity_bytes * cores == pytest.approx(chip.hbm_bytes.value, rel=0.08)
    assert core.mem_bw_bytes_per_second * cores / 1e9 == pytest.approx(
        chip.hbm_gbps.value, rel=0.13
    )
    assert core.bf16_ops_per_second * cores / 1e12 == pytest.approx(chip.peak().value, rel=0.15)
    for kind in chip.device_kinds:
        assert TABLE.chip_version_from_device_kind(kind) == version


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p"])
def test_clock_times_matrix_units_is_the_stated_peak(name):
    """Three sources at once: the compiler's clock, jax's matrix units, the vendor's peak."""
    chip = CHIPS[name]
    products = chip.cores_per_chip * chip.mxus_per_core.value * chip.mxu_size.value**2
    assert 2 * products * chip.clock_ghz.value / 1000 == pytest.approx(chip.peak().value, rel=0.01)


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "cycles", "clock_ghz"),
    [
        ("v5e", "bf16", 16, 16, 1.5),
        ("v5p", "bf16", 16, 16, 1.75),
        ("v5p", "int8", 32, 16, 1.75),
        ("v6e", "bf16", 16, 8, 1.75),
        ("v6e", "int8", 32, 8, 1.75),
        ("7x", "bf16", 16, 8, 2.2),
        ("7x", "fp8", 32, 8, 2.2),
        ("8i", "bf16", 16, 16, 2.1),
        ("8i", "fp8", 32, 4, 2.1),
        ("8t", "bf16", 32, 16, 1.9),
        ("8t", "fp8", 64, 16 / 3, 1.9),
        ("8t", "int4", 2 * 64, 16 / 3, 1.9),
    ],
)
def test_peaks_are_those_of_the_matrix_units(name, dtype, rows, cycles, clock_ghz):
    """By openxla/xla@acb91cba, xla/benchmarks/core/platform_info.py: cycles between the products
    of a unit with one register of packed rows, and clocks. It doubles the summed side for four
    bits, which is as good as twice the rows."""
    chip = CHIPS[name]
    units = chip.cores_per_chip * chip.mxus_per_core.value
    flops = 2 * units * chip.mxu_size.value**2 * rows / cycles
    assert flops * clock_ghz / 1000 == pytest.approx(chip.peak(dtype).value, rel=0.002)
    bits = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 8}[dtype]  # its registers hold 64 rows
    assert chip.sublanes.value * 32 // bits * (2 if dtype == "int4" else 1) == rows


@pytest.mark.parametrize(
    ("pod", "terabytes_per_s"),
    [("v3-2048", 6.4), ("v4-8192", 24), ("v5e-256", 1.6), ("v6e-256", 3.2)],
)
def test_bisection_of_a_pod_is_the_vendors(pod, terabytes_per_s):
    assert Slice.parse(pod).bisection_gbps.value == pytest.approx(terabytes_per_s * 1000, rel=0.01)


def test_pod_peaks_are_the_vendors():
    assert Slice.parse("v3-2048").peak_tflops().value == pytest.approx(126e3, rel=0.01)
    assert Slice.parse("v4-8192").peak_tflops().value == pytest.approx(1.1e6, rel=0.03)
    assert Slice.parse("v6e-256").peak_tflops().value == pytest.approx(234.9e3, rel=0.01)


@pytest.mark.parametrize("chip", [c for c in CHIPS.values() if c.rules], ids=str)
def test_structure_is_consistent(chip):
    assert chip.hbm_usable_bytes.value <= chip.hbm_bytes.value
    assert chip.cores_per_chip == chip.cores_per_device * chip.devices_per_chip
    assert chip.ici_links_per_chip == 2 * chip.torus_dims
    assert chip.interconnect == f"{chip.torus_dims}D torus"
    assert max(chip.rules.by_chips) <= chip.pod_chips
    assert math.prod(chip.rules.host_bounds) == chip.chips_per_host
    assert chip.needs_gke == (chip.api_prefix is None)
    assert isinstance(chip.hbm_usable_bytes.value, int)
    share = chip.per_device(chip.hbm_usable_bytes)
    assert share.value * chip.devices_per_chip == pytest.approx(chip.hbm_usable_bytes.value)
    assert chip.to_dict()["figures"]["hbm_bytes"]["unit"] == "B"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("v5e", "v5e"),
        ("V5LITEPOD", "v5e"),
        ("TPU v5 lite", "v5e"),
        ("tpu-v5-lite-podslice", "v5e"),
        ("TPU v5", "v5p"),
        ("trillium", "v6e"),
        ("TPU v6 lite", "v6e"),
        ("tpu_v4", "v4"),
        ("TPU7x", "7x"),
        ("v7", "7x"),
        ("TPU v7", "7x"),
        ("v7x", "7x"),
        ("ironwood", "7x"),
        ("TPU8i", "8i"),
        ("TPU8t", "8t"),
    ],
)
def test_generations_by_any_name(spelling, name):
    assert get_chip(spelling).name == name


def test_unknown_generation_and_type_name_the_nearest():
    with pytest.raises(SliceError, match=r"'v5x' is not a TPU generation.*Did you mean"):
        get_chip("v5x")
    with pytest.raises(TPUValidationError, match=r"'bf17' is not a number format.*'bf16'"):
        get_chip("v6e").peak("bf17")
    with pytest.raises(SliceError, match="no peak for int32; they do for bf16, fp8"):
        get_chip("v6e").peak("s32")
    assert get_chip("v6e").peak("float8_e4m3fn") == get_chip("v6e").peak("fp8")


@pytest.mark.parametrize("name", ["8i", "8t"])
def test_the_newest_chips_have_figures_and_no_slices(name):
    newest = get_chip(name)
    assert newest.peak("fp8").value > 2 * newest.peak("bf16").value
    assert newest.hbm_usable_bytes.value is None
    assert newest.ici_link_gbps.value is None
    assert newest.host_ram_bytes.value is None
    assert newest.torus_dims is None
    assert newest.libtpu_name is None


def test_tiles_are_as_tall_as_the_registers_of_the_chip():
    for chip in CHIPS.values():
        rows, lanes = tile_shape("float32", chip.name)
        assert (rows, lanes) == (chip.sublanes.value, chip.lanes.value)
    assert tile_shape("bfloat16", "8t") == (32, 128)
    assert tile_shape("int8", "v6e") == (32, 128)


def test_an_incomplete_data_file_is_refused():
    text = (resources.files("tpukit.hardware") / "data" / "chips" / "v6e.toml").read_text("utf-8")
    for found, instead, message in [
        ("hbm_gbps =", "hbm_speed =", "missing or unknown: hbm_gbps, hbm_speed"),
        ('source = "tpu_info"', 'source = "rumour"', "cites the source 'rumour'.*describes docs"),
    ]:
        assert found in text
        with pytest.raises(TPUValidationError, match=message):
            chip_from(tomllib.loads(text.replace(found, instead)))
    with pytest.raises(TPUValidationError, match="origin 'rumour'"):
        chip_from(tomllib.loads(text.replace('origin = "datasheet"', 'origin = "rumour"')))
