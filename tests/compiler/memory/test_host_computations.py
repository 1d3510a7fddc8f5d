"""What the host computes in is host memory, though the compiler lists it beside the HBM."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax_names import on_host

from tpukit.compiler import compile_for
from tpukit.compiler.dump import Listings
from tpukit.compiler.memory import read_memory
from tpukit.compiler.memory.assignment import parse_assignment, total_bytes
from tpukit.compiler.memory.view import OFFLOADED_COMPUTATION
from tpukit.compiler.program.lowered import ProgramFacts
from tpukit.hardware import Slice

DATA = Path(__file__).parent / "data"
ARRAY = 512 * 512 * 4


def kept(name):
    return (DATA / f"host_computation_{name}.txt").read_text()


@pytest.fixture(scope="module")
def report():
    """`half_on_the_host` below with sides of 512, as libtpu 0.0.42 listed it."""
    listings = Listings(kept("hlo"), kept("assignment"), kept("live_ranges"), devices="")
    facts = ProgramFacts(
        *("half_on_the_host", ("[0]", "[1]"), (1, 1), (), ()), fingerprint="", source_fingerprint=""
    )
    return read_memory(listings, facts=facts, target=Slice.parse("v6e-1"), fits=True)


def test_the_hosts_buffers_are_not_in_hbm(report):
    listed = total_bytes(parse_assignment(kept("assignment")))
    # Its argument, its result, four results between, four scalars and two constants.
    assert report.host_computation_bytes == 6 * ARRAY + 6 * 4096
    assert report.host_bytes == report.host_computation_bytes
    assert report.total_bytes == listed - report.host_computation_bytes
    assert sum(report.purposes.values()) == report.total_bytes
    # What goes to the host and comes back lies on the chip.
    assert report.temp_bytes == pytest.approx(2 * ARRAY, rel=0.02)


def test_they_are_listed_as_the_hosts(report):
    of_host = [one for one in report.buffers if one.space == "host"]
    assert {one.purpose for one in of_host} == {OFFLOADED_COMPUTATION}
    assert sum(one.size_bytes for one in of_host) == report.host_bytes
    assert "sin" in {one.name for one in of_host}
    assert report.to_dict()["host_computation_bytes"] == report.host_computation_bytes


@on_host
def waves(x):
    return jnp.sin(x) * 2 + x.sum()


def half_on_the_host(x, w):
    return waves(x @ w) @ w


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
@pytest.mark.parametrize(("side", "fits"), [(40_448, True), (41_472, False)])
def test_the_total_is_what_the_compiler_tests(side, fits, tmp_path):
    # Five such arrays are just below and just above what a v6e holds; the host has six more.
    matrix = jax.ShapeDtypeStruct((side, side), jnp.float32)
    compiled = compile_for(
        half_on_the_host, "v6e-1", matrix, matrix, until="memory", dump_to=tmp_path
    )
    memory = compiled.memory
    (usage,) = tmp_path.glob("*.jit_call.*-memory-usage-report.txt")
    counted = next(line for line in usage.read_text().splitlines() if line.startswith("Total"))
    assert compiled.fits == fits
    assert (memory.total_bytes <= memory.usable_bytes) == fits
    assert int(counted.split()[2]) > memory.usable_bytes
    assert memory.host_computation_bytes > 5 * side**2 * 4
    assert memory.total_bytes == pytest.approx(5 * side**2 * 4, rel=0.01)
