"""Saved programs: the same numbers in another process, and a clear word on every mismatch."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tpukit import Workload
from tpukit.compiler import make_request
from tpukit.compiler.executable.file import read_header
from tpukit.compiler.executable.saving import load_executable, save_executable
from tpukit.compiler.executable.slots import decode_structure, encode_structure
from tpukit.errors import TPUModelError, TPUNotAvailableError, TPUValidationError
from tpukit.parallel import create_mesh


def function(weights, x):
    y = jnp.tanh(x @ weights["w"])
    return {"y": y, "more": (y.sum(), None)}


def arguments():
    return {"w": np.arange(16, dtype=np.float32).reshape(4, 4)}, np.ones((8, 4), np.float32)


def linear_workload():
    def init(rng):
        return {"w": jax.random.normal(rng, (16, 16))}

    def apply(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    return Workload((init, apply), batch={"x": jax.ShapeDtypeStruct((8, 16), jnp.float32)})


@pytest.fixture(scope="module")
def mesh():
    return create_mesh(mesh_shape=(8,), axis_names=("fsdp",))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, mesh):
    """A program over eight devices, in a file."""
    path = tmp_path_factory.mktemp("saved") / "step.tpukit"
    split, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("fsdp",), ()))
    jitted = jax.jit(
        function,
        in_shardings=({"w": whole}, split),
        out_shardings={"y": split, "more": (whole, None)},
    )
    header = save_executable(jitted.lower(*arguments()).compile(), path)
    assert header == read_header(path)
    return path


def change(path, folder, **changes):
    """A copy of a file with some of its header changed."""
    copy = folder / "changed.tpukit"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w") as new:
        header = json.loads(old.read("header.json"))
        new.writestr("header.json", json.dumps({**header, **changes}))
        new.writestr("executable.bin", old.read("executable.bin"))
    return copy


class TestRoundTrip:
    def test_a_fresh_process_gets_the_same_numbers(self, saved):
        child = Path(__file__).with_name("saved_program_child.py")
        done = subprocess.run(
            [sys.executable, str(child), str(saved)], capture_output=True, text=True, check=True
        )
        found, expected = json.loads(done.stdout), function(*arguments())
        np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-6)
        assert found["total"] == pytest.approx(float(expected["more"][0]))

    def test_results_lie_where_the_program_put_them(self, saved, mesh):
        result = load_executable(saved)(*arguments())
        assert result["y"].sharding.is_equivalent_to(
            NamedSharding(mesh, PartitionSpec("fsdp")), ndim=2
        )
        assert result["more"][1] is None

    def test_an_argument_that_is_never_read_is_still_an_argument(self, tmp_path):
        compiled = jax.jit(lambda a, b: [a + 1]).lower(jnp.ones(3), jnp.ones(5)).compile()
        header = save_executable(compiled, tmp_path / "f", name="plus")
        assert [slot.kept for slot in header.arguments] == [True, False]
        (result,) = load_executable(tmp_path / "f")(np.zeros(3, np.float32), np.zeros(5, "f4"))
        np.testing.assert_array_equal(result, np.ones(3))

    def test_a_whole_training_step(self, tmp_path, mesh):
        work = linear_workload()
        compiled = work.jit_train_step(mesh).lower(*work.abstract_args(mesh)).compile()
        save_executable(compiled, tmp_path / "step")
        batch = work.put_batch(mesh, work.example_batch())
        expected = compiled(work.init_on(mesh, jax.random.key(0)), batch)
        like = jax.tree.map(lambda leaf: 0, expected)
        loaded = load_executable(tmp_path / "step", like=like)
        state, metrics = loaded(work.init_on(mesh, jax.random.key(0)), batch)
        assert float(metrics["loss"]) == float(expected[1]["loss"])
        assert jax.tree.structure(state) == jax.tree.structure(expected[0])
        again, _ = loaded(state, batch)  # the state was donated, the new one goes in
        assert int(again.step) == 2
        flat = load_executable(tmp_path / "step")(work.init_on(mesh, jax.random.key(0)), batch)
        assert isinstance(flat, list)

    def test_arguments_are_checked(self, saved):
        step = load_executable(saved)
        weights, x = arguments()
        with pytest.raises(TPUModelError, match=r"float32\[8, 5\], and function was compiled for"):
            step(weights, np.ones((8, 5), np.float32))
        with pytest.raises(TPUModelError, match=r"takes 2 arrays and was given 1: \[1\] missing"):
            step(weights)
        with pytest.raises(TPUModelError, match=r"\[0\]\['v'\] is none of them. Did you mean"):
            step({"v": weights["w"]}, x)
        with pytest.raises(TPUValidationError, match="like= has 1 leaves"):
            load_executable(saved, like=0)


class TestRefusals:
    def test_another_version(self, saved, tmp_path):
        versions = {**read_header(saved).versions, "jaxlib": "0.1.0"}
        with pytest.raises(TPUValidationError, match=r"saved with jaxlib 0.1.0 \(here 0"):
            load_executable(change(saved, tmp_path, versions=versions))

    def test_another_topology(self, saved, tmp_path):
        with pytest.raises(TPUValidationError, match=r"none of them at \(99,\)"):
            load_executable(change(saved, tmp_path, devices=[[99]]))

    def test_another_accelerator(self, saved, tmp_path):
        wrong = change(saved, tmp_path, platform="cuda", device_kind="NVIDIA H200")
        with pytest.raises(TPUNotAvailableError, match="compiled for NVIDIA H200"):
            load_executable(wrong)

    def test_another_cpu(self, saved, tmp_path):
        with pytest.raises(TPUValidationError, match="another kind of CPU"):
            load_executable(change(saved, tmp_path, host="0123"))

    def test_another_format(self, saved, tmp_path):
        with pytest.raises(TPUValidationError, match=r"has the format 'tpukit.executable/9'"):
            load_executable(change(saved, tmp_path, format="tpukit.executable/9"))

    def test_a_changed_program(self, saved, tmp_path):
        with pytest.raises(TPUValidationError, match="is damaged"):
            load_executable(change(saved, tmp_path, checksum="0"))

    @given(keep=st.floats(0, 0.99))
    def test_a_file_cut_short_anywhere(self, saved, tmp_path_factory, keep):
        whole = saved.read_bytes()
        cut = tmp_path_factory.mktemp("cut") / "cut.tpukit"
        cut.write_bytes(whole[: int(len(whole) * keep)])
        with pytest.raises(TPUValidationError, match="cut short or damaged"):
            load_executable(cut)

    def test_no_file_and_another_file(self, tmp_path):
        with pytest.raises(TPUValidationError, match="cannot be read"):
            load_executable(tmp_path / "none")
        (tmp_path / "text").write_text("hello")
        with pytest.raises(TPUValidationError, match="no saved program"):
            load_executable(tmp_path / "text")
        with zipfile.ZipFile(tmp_path / "other", "w") as other:
            other.writestr("header.json", "[]")
        with pytest.raises(TPUValidationError, match="has the format None"):
            load_executable(tmp_path / "other")

    def test_what_is_not_compiled_or_cannot_be_written(self, tmp_path):
        with pytest.raises(TPUValidationError, match="a function is no compiled program"):
            save_executable(function, tmp_path / "f")
        named = jax.jit(lambda *, x: x).lower(x=jnp.ones(2)).compile()
        with pytest.raises(TPUValidationError, match="keyword arguments"):
            save_executable(named, tmp_path / "f")
        assert not (tmp_path / "f").exists()


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_a_program_for_a_slice_nobody_rented(tmp_path):
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    x = jax.ShapeDtypeStruct(
        (256, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    request = make_request(lambda x: x - x.mean(0), "v6e-4", x)
    header = save_executable(request, tmp_path / "step", name="centre")
    assert header == read_header(tmp_path / "step")
    assert (header.platform, header.slice, header.name) == ("tpu", "v6e-4", "centre")
    assert header.arguments[0].path == "[0]"
    assert header.arguments[0].spec == (("data",), ())
    assert len({place[:3] for place in header.devices}) == 4
    assert header.code_bytes > 1000
    libtpu = header.versions["libtpu"]
    with pytest.raises(
        TPUNotAvailableError, match=f"on a TPU VM of that slice with libtpu {libtpu}"
    ):
        load_executable(tmp_path / "step")


@given(
    st.recursive(
        st.integers(0, 3) | st.none(),
        lambda inside: (
            st.lists(inside, max_size=3)
            | st.lists(inside, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=3), inside, max_size=3)
        ),
    )
)
def test_structures_survive_text(tree):
    structure = jax.tree.structure(tree)
    assert decode_structure(encode_structure(structure)) == structure
