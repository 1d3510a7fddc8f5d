"""The real compiler, in a child: what it accepts, what it refuses, and that we survive it."""

import io

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tpukit.compiler import compile_for, lower_program
from tpukit.errors import (
    FlagError,
    MeshError,
    TPUModelError,
    TPUOutOfMemoryError,
    XLACompilationError,
)

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
MESH = AbstractMesh((2, 4), ("data", "model"))


def layer(weights, x):
    return jnp.tanh(x @ weights["w"] + weights["b"])


def shape(*sizes, spec=None, mesh=MESH, dtype="bfloat16"):
    sharding = None if spec is None else NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def test_one_device_memory_is_what_the_arrays_need():
    weights = {"w": shape(1024, 2048), "b": shape(2048)}
    compiled = compile_for(layer, "v6e-1", weights, shape(256, 1024))
    assert compiled.memory.argument_bytes == 2 * (1024 * 2048 + 2048 + 256 * 1024)
    assert compiled.memory.result_bytes >= 2 * 256 * 2048
    assert compiled.memory.fits
    assert compiled.flops.value == 2 * 256 * 1024 * 2048
    assert compiled.collectives == {}
    assert compiled.versions["libtpu"]
    assert compiled.usable_bytes is not None
    assert "FITS" in _as_text(compiled)
    assert compiled.to_dict()["memory"]["origin"] == "compiler"
    assert compiled.stage == "codegen"


@pytest.mark.parametrize("name", ["v4-16", "v5e-8", "v6e-8", "tpu7x-2x2x1"])
def test_a_sharded_program_for_every_kind_of_slice(name):
    weights = {"w": shape(1024, 2048, spec=("data", "model")), "b": shape(2048, spec=("model",))}
    x = shape(256, 1024, spec=("data", None))
    compiled = compile_for(layer, name, weights, x, until="schedule")
    per_device = 2 * (1024 * 2048 // 8 + 2048 // 4 + 256 * 1024 // 2)
    assert compiled.memory.argument_bytes == per_device
    assert sum(compiled.collectives.values()) > 0  # the weights are gathered over "data"


def test_donation_reuses_the_argument():
    def add(a, b):
        return a + b

    x = shape(512, 512)
    kept = compile_for(add, "v5e-1", x, x, until="memory")
    donated = compile_for(add, "v5e-1", x, x, donate_argnums=(0,), until="memory")
    assert kept.memory.alias_bytes == 0
    assert donated.memory.alias_bytes == 2 * 512 * 512
    assert donated.memory.total_bytes < kept.memory.total_bytes


def test_what_does_not_fit_says_by_how_much():
    # (200,000² + 2 × 200,000 × 1024) bf16 values are 75.27 GiB before any padding.
    with pytest.raises(TPUOutOfMemoryError, match=r"needs 75\.[23]\dG of HBM .* has 31\.2\dG"):
        compile_for(jnp.dot, "v6e-1", shape(200_000, 200_000), shape(200_000, 1024))


def test_an_unknown_option_is_named():
    with pytest.raises(FlagError, match="xla_tpu_nonsense"):
        compile_for(jnp.sin, "v6e-1", shape(8, 128), options={"xla_tpu_nonsense": True})


def test_a_compile_that_takes_too_long_is_killed():
    with pytest.raises(XLACompilationError, match=r"within 0\.2 s"):
        compile_for(jnp.sin, "v6e-1", shape(8, 128), timeout_s=0.2)


def test_a_function_that_cannot_be_traced():
    with pytest.raises(TPUModelError, match=r"dot.*contracting"):
        compile_for(jnp.dot, "v6e-1", shape(8, 9), shape(8, 9))


def test_mesh_and_slice_must_agree():
    x = shape(8, 128, spec=("data", "model"))
    with pytest.raises(MeshError, match="2 x 4 = 8 devices, but v6e-16 has 16"):
        compile_for(jnp.sin, "v6e-16", x)
    other = AbstractMesh((8,), ("data",))
    with pytest.raises(MeshError, match="2 different meshes"):
        compile_for(jnp.add, "v6e-8", x, shape(8, 128, spec=("data",), mesh=other))
    with pytest.raises(MeshError, match="does not split a mesh"):
        compile_for(jnp.sin, "2xv6e-4", x, dcn_mesh_shape=(4, 1))


def test_two_slices_compile():
    x = shape(8, 128, spec=("data", "model"))
    compiled = compile_for(lambda x: x.sum(), "2xv6e-4", x, dcn_mesh_shape=(2, 1), until="schedule")
    assert compiled.slice_of_device == (0, 0, 0, 0, 1, 1, 1, 1)


def test_a_pallas_kernel_goes_through_mosaic():
    from jax.experimental import pallas as pl

    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def kernel(x):
        return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    compiled = compile_for(kernel, "v5p-8", shape(256, 256, dtype="float32"))
    assert "tpu_custom_call" in compiled.hlo


def test_the_same_program_has_the_same_fingerprint():
    first = lower_program(layer, {"w": shape(8, 8), "b": shape(8)}, shape(4, 8))
    again = lower_program(layer, {"w": shape(8, 8), "b": shape(8)}, shape(4, 8))
    other = lower_program(layer, {"w": shape(8, 8), "b": shape(8)}, shape(2, 8))
    deeper = (lambda: lower_program(layer, {"w": shape(8, 8), "b": shape(8)}, shape(4, 8)))()
    assert deeper.fingerprint == first.fingerprint
    assert deeper.facts.source_fingerprint != first.facts.source_fingerprint
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.argument_names == ("[0]['b']", "[0]['w']", "[1]")


def test_a_scatter_has_the_same_fingerprint_from_wherever_it_is_lowered():
    def counted(rows):  # the scatter's own block names the place it was called from
        return jnp.zeros(8, jnp.int32).at[rows].add(1)

    def lowered(depth):
        return lowered(depth - 1) if depth else lower_program(counted, shape(4, dtype="int32"))

    assert lowered(0).fingerprint == lowered(3).fingerprint


def _as_text(result):
    from rich.console import Console

    console = Console(width=100, record=True, file=io.StringIO())
    console.print(result)
    return console.export_text()
