"""The catalog against the TPU compiler itself, which knows every generation without a TPU."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tpukit.compiler.dump import KernelDump
from tpukit.hardware import Slice, list_chips, list_slices, parse_format
from tpukit.hardware.slice import chip_positions
from tpukit.runtime.child import offline_environment

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]

COMPILED = [chip for chip in list_chips() if chip.libtpu_name]
SLICES = [
    *(one for chip in COMPILED for one in (list_slices(chip.name)[0], list_slices(chip.name)[-1])),
    *map(Slice.parse, ("v2-128", "v3-32", "v4-32", "v4-128", "v5e-8", "v5e-128", "v5p-32")),
    *map(Slice.parse, ("v5p:4x4x16", "v6e-8", "v6e-64", "tpu7x-2x2x1", "tpu7x-4x4x8")),
    *map(Slice.parse, ("2xv4-8", "3xv5e-16", "2xv5p-128", "2xv6e-256", "2xtpu7x-2x2x1")),
]
REFUSED = (
    *("v6e:3x3", "v5p:2x3x4", "v7x:2x2x1"),
    *("tpu8i:2x2x1", "8i:2x2x1", "tpu8t:2x2x1", "8t:2x2x1"),
)
SINGLE = "v6e:1x1"


def ask(folder, *, flags="", **request):
    pytest.importorskip("libtpu")
    reply = folder / "reply.json"
    everything = {"topologies": [], "limits": [], "clocks": [], "products": [], **request}
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ask_libtpu.py")), str(reply)],
        input=json.dumps(everything).encode(),
        env={**offline_environment(), "LIBTPU_INIT_ARGS": flags},
        check=True,
        capture_output=True,
        timeout=240,
    )
    return json.loads(reply.read_text())


def arguments(one):
    return [one.libtpu_topology, one.libtpu_options]


@pytest.fixture(scope="module")
def libtpu(tmp_path_factory):
    return ask(
        tmp_path_factory.mktemp("libtpu"),
        topologies=[*map(arguments, SLICES), *([name, {}] for name in (*REFUSED, SINGLE))],
        limits=[arguments(list_slices(chip.name)[0]) for chip in COMPILED],
    )


@pytest.mark.parametrize("index", range(len(SLICES)), ids=map(str, SLICES))
def test_chips_of_hosts_lie_where_libtpu_has_them(libtpu, index):
    positions = chip_positions(SLICES[index])
    seen = libtpu["topologies"][index]["chips_by_process"]
    expected = [
        (process, chip, coordinates)
        for process, chips in enumerate(seen)
        for chip, coordinates in enumerate(chips)
    ]
    found = [(one.process, one.chip, [*one.coordinates, 0][:3]) for one in positions]
    assert found == expected


@pytest.mark.parametrize("index", range(len(SLICES)), ids=map(str, SLICES))
def test_devices_and_coordinates_are_the_catalogs(libtpu, index):
    one, seen = SLICES[index], libtpu["topologies"][index]
    assert seen["devices"] == one.devices
    axes = [range(length) for length in (*one.topology, 1)[:3]]
    assert seen["coords"] == [list(coords) for coords in itertools.product(*axes)]
    assert seen["slices"] == list(range(one.num_slices))
    assert seen["hosts"] == one.hosts
    assert seen["cores_on_chip"] == list(range(one.chip.devices_per_chip))
    assert seen["cores_per_device"] == [one.chip.cores_per_device]
    assert set(seen["device_kinds"]) <= set(one.chip.device_kinds)


@pytest.mark.parametrize("name", REFUSED)
def test_libtpu_refuses_what_the_catalog_lacks(libtpu, name):
    assert "error" in libtpu["topologies"][len(SLICES) + REFUSED.index(name)]


def test_a_single_chip_is_one_device_where_its_host_bounds_need_not_be_said(libtpu):
    """libtpu 0.0.42 refuses it under the default host bounds, which is why the catalog has them."""
    single = libtpu["topologies"][-1]
    assert "error" in single or single["devices"] == 1


@pytest.mark.parametrize("chip", COMPILED, ids=str)
def test_usable_memory_is_what_the_compiler_states(libtpu, chip):
    stated = libtpu["limits_gib"][COMPILED.index(chip)]
    catalogued = chip.per_device(chip.hbm_usable_bytes).value / 2**30
    assert stated == pytest.approx(catalogued, abs=0.011)


@pytest.mark.slow
def test_clocks_are_what_the_scheduler_reckons_with(tmp_path):
    clocked = [chip for chip in COMPILED if chip.clock_ghz.value]
    hosts = [Slice.of(chip.name, chips=4) for chip in clocked]
    clocks = ask(tmp_path, clocks=[arguments(host) for host in hosts])["clocks_mhz"]
    assert clocks == [[round(chip.clock_ghz.value * 1000)] for chip in clocked]


@pytest.mark.slow
def test_products_are_made_in_the_formats_that_the_catalog_says(tmp_path):
    """int4 and uint4 are left out: jax calls them native, the compiler widens them."""
    narrow = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int8", "uint8"]
    hosts = [list_slices(chip.name)[0] for chip in COMPILED]
    dump = KernelDump(tmp_path)
    asked = [[*arguments(host), narrow, str(tmp_path)] for host in hosts]
    answers = ask(tmp_path, flags=dump.environment["LIBTPU_INIT_ARGS"], products=asked)["products"]
    for chip, found in zip(COMPILED, answers, strict=True):
        for name in narrow:
            own = parse_format(name).hlo.removesuffix("fnuz")  # as its instructions call it
            assert found[name] == [own if chip.multiplies(name) else "f32"], (chip, name)
