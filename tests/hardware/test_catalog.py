"""The catalog against independent truths: jax's own table, arithmetic, and the vendor's totals."""

import math
import tomllib
from importlib import resources

import pytest

from tpukit.errors import SliceError, TPUValidationError
from tpukit.hardware import Slice, get_chip, list_chips
from tpukit.hardware.catalog import GENERATIONS, chip_from
from tpukit.hardware.figure import ORIGINS

CHIPS = {chip.name: chip for chip in list_chips()}
JAX_NAMES = dict(zip(GENERATIONS, ("V2", "V3", "V4", "V5E", "V5P", "V6E", "7X", "8I"), strict=True))


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
    assert bool(chip.rules) == bool(chip.topology_source)


@pytest.mark.parametrize("name", GENERATIONS)
def test_jax_knows_the_same_chip(name):
    """Within the 13 % by which the sources disagree, which the notes spell out."""
    tpu_info = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
    version = tpu_info.ChipVersion[f"TPU_{JAX_NAMES[name]}"]
    chip = CHIPS[name]
    core = tpu_info.get_tpu_info_for_chip(version, chip.cores_per_device)
    cores = version.num_physical_tensor_cores_per_chip
    assert cores == chip.cores_per_chip
    assert core.vmem_capacity_bytes == chip.vmem_bytes.value
    assert core.smem_capacity_bytes == chip.smem_bytes.value
    assert core.num_mxus == chip.mxus_per_core.value
    assert core.mxu_column_size == chip.mxu_size.value
    assert core.hbm_capacity_bytes * cores == pytest.approx(chip.hbm_bytes.value, rel=0.08)
    assert core.mem_bw_bytes_per_second * cores / 1e9 == pytest.approx(
        chip.hbm_gbps.value, rel=0.13
    )
    assert core.bf16_ops_per_second * cores / 1e12 == pytest.approx(chip.peak().value, rel=0.15)
    for kind in chip.device_kinds:
        assert tpu_info.chip_version_from_device_kind(kind) == version


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p"])
def test_clock_times_matrix_units_is_the_stated_peak(name):
    """Three sources at once: the compiler's clock, jax's matrix units, the vendor's peak."""
    chip = CHIPS[name]
    products = chip.cores_per_chip * chip.mxus_per_core.value * chip.mxu_size.value**2
    assert 2 * products * chip.clock_ghz.value / 1000 == pytest.approx(chip.peak().value, rel=0.01)


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
    ],
)
def test_generations_by_any_name(spelling, name):
    assert get_chip(spelling).name == name


def test_unknown_generation_and_type_name_the_nearest():
    with pytest.raises(SliceError, match=r"'v5x' is not a TPU generation.*Did you mean"):
        get_chip("v5x")
    with pytest.raises(TPUValidationError, match=r"'bf17' is no number format.*'bf16'"):
        get_chip("v6e").peak("bf17")
    with pytest.raises(SliceError, match="no peak for int32; they do for bf16, fp8"):
        get_chip("v6e").peak("s32")
    assert get_chip("v6e").peak("float8_e4m3fn") == get_chip("v6e").peak("fp8")


def test_the_newest_chip_has_figures_and_no_slices():
    newest = get_chip("8i")
    assert newest.peak("fp8").value == 8808
    assert newest.hbm_usable_bytes.value is None
    assert newest.torus_dims is None


def test_an_incomplete_data_file_is_refused():
    text = (resources.files("tpukit.hardware") / "data" / "v6e.toml").read_text("utf-8")
    for found, instead, message in [
        ("hbm_gbps =", "hbm_speed =", "missing or unknown: hbm_gbps, hbm_speed"),
        ('source = "tpu_info"', 'source = "rumour"', "cites the source 'rumour'.*describes docs"),
    ]:
        assert found in text
        with pytest.raises(TPUValidationError, match=message):
            chip_from(tomllib.loads(text.replace(found, instead)))
    with pytest.raises(TPUValidationError, match="origin 'rumour'"):
        chip_from(tomllib.loads(text.replace('origin = "datasheet"', 'origin = "rumour"')))
