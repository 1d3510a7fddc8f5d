"""Damaged and half-written checkpoints are found, named and passed over, whatever the damage."""

import json
import logging
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tpukit.errors import TPUCheckpointError
from tpukit.training.checkpoint import TPUCheckpointer
from tpukit.training.checkpoint.record import missing_records, record_name


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine") / "checkpoints"
    mesh = jax.make_mesh((8,), ("fsdp",))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    with TPUCheckpointer(folder) as checkpointer:
        for step in (10, 20):
            w = jax.device_put(jnp.full((64, 64), step), sharding)
            params = {"w": w, "b": jnp.arange(40.0)}
            checkpointer.save(step, params=params, opt_state={"mu": jnp.ones(30)}, data={"i": step})
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "copy")
    return tmp_path / "copy"


def files_of(step_folder):
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def flip(path, offset, bit=0):
    content = bytearray(path.read_bytes())
    content[offset % len(content)] ^= 1 << bit
    path.write_bytes(content)


def assert_falls_back(folder, caplog, reason):
    with TPUCheckpointer(folder) as checkpointer:
        restored = checkpointer.restore()
        assert restored.step == 10
        np.testing.assert_array_equal(restored.params["w"], np.full((64, 64), 10))
        assert reason in restored.skipped[20]
        assert f"Skipping the checkpoint of step 20: {restored.skipped[20]}" in caplog.text
        assert checkpointer.verify(10).good
        with pytest.raises(TPUCheckpointError, match=r"Step 20 .* cannot be restored"):
            checkpointer.restore(20)
        # Training takes step 20 again: what is there must not stand in its way.
        checkpointer.save(20, params={"w": jnp.zeros(2)})
        assert checkpointer.restore().step == 20


def test_a_copy_is_as_good_as_the_original(folder):
    with TPUCheckpointer(folder) as checkpointer:
        assert checkpointer.steps() == [10, 20]
        found = checkpointer.verify(20)
        assert found.good
        # Everything but the record itself, which carries its own digest.
        assert found.files == len(files_of(folder / "20")) - 1
        assert checkpointer.restore().step == 20


def test_eight_devices_wrote_it_and_a_machine_with_one_reads_it(folder):
    """With and without a word on where the arrays go (google/orbax#648)."""
    code = f"""
import jax, numpy as np
from tpukit.training.checkpoint import TPUCheckpointer
assert len(jax.devices()) == 1
with TPUCheckpointer({str(folder)!r}) as checkpointer:
    assert checkpointer.restore().params["b"].tolist() == list(range(40))
    like = {{"w": jax.numpy.zeros((64, 64), int), "b": jax.numpy.zeros(40)}}
    assert checkpointer.restore(like={{"params": like}}).params["w"].sum() == 20 * 64 * 64
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "XLA_FLAGS": ""}, check=True)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(file=st.integers(0, 10**6), offset=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_found(folder, file, offset, bit):
    files = files_of(folder / "20")
    chosen = files[file % len(files)]
    before = chosen.read_bytes()
    if chosen.parent.name == "tpukit":
        # White space between the parts of the record says nothing.
        json_text = before.decode()
        offset = min(offset % len(before), len(json_text.rstrip()) - 1)
    flip(chosen, offset, bit)
    try:
        assert not TPUCheckpointer(folder).verify(20).good, (chosen, offset, bit)
    finally:
        chosen.write_bytes(before)


def test_a_flipped_bit_in_the_weights(folder, caplog):
    largest = max(files_of(folder / "20" / "params"), key=lambda path: path.stat().st_size)
    flip(largest, 1000)
    assert_falls_back(folder, caplog, "has digest crc32:")


def test_a_file_cut_short(folder, caplog):
    largest = max(files_of(folder / "20" / "params"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert_falls_back(folder, caplog, "bytes, but was written with")


def test_a_file_that_is_gone(folder, caplog):
    (folder / "20" / "params" / "manifest.ocdbt").unlink()
    assert_falls_back(folder, caplog, "is missing")


def test_a_save_that_never_finished(folder, caplog):
    shutil.rmtree(folder / "20" / "tpukit")
    assert_falls_back(folder, caplog, "no process has recorded its part")


def test_a_record_that_is_gone_on_a_pod(folder, caplog):
    records = folder / "20" / "tpukit"
    (records / record_name(0, 1)).rename(records / record_name(0, 3))
    assert_falls_back(folder, caplog, "of 3 processes, 1, 2 left no record")


def test_a_deletion_that_was_interrupted(folder, caplog):
    for path in files_of(folder / "20"):
        if path.parent != folder / "20" / "tpukit":
            path.unlink()
    assert_falls_back(folder, caplog, "is missing")


def test_damage_to_what_is_not_asked_for_does_not_matter(folder):
    flip(max(files_of(folder / "20" / "opt_state"), key=lambda path: path.stat().st_size), 20)
    with TPUCheckpointer(folder) as checkpointer:
        like = {"params": {"w": np.zeros((64, 64), np.int32), "b": np.zeros(40, np.float32)}}
        assert checkpointer.restore(like=like).step == 20
        assert checkpointer.restore().step == 10


def test_nothing_good_is_an_error_and_nothing_is_deleted(folder):
    for step in ("10", "20"):
        flip(folder / step / "params" / "manifest.ocdbt", 30)
    before = files_of(folder)
    with (
        TPUCheckpointer(folder) as checkpointer,
        pytest.raises(TPUCheckpointError, match=r"No checkpoint in .* is good"),
    ):
        checkpointer.restore()
    assert files_of(folder) == before


def test_what_crashes_left_is_cleared_at_the_next_save(folder, caplog):
    left = folder / "30.orbax-checkpoint-tmp" / "params"
    left.mkdir(parents=True)
    (folder / "25").mkdir()
    with TPUCheckpointer(folder) as checkpointer, caplog.at_level(logging.INFO):
        assert checkpointer.restore().step == 20
        assert left.exists(), "reading deletes nothing"
        checkpointer.save(30, params={"w": jnp.zeros(2)})
        checkpointer.wait()
        assert checkpointer.steps() == [10, 20, 30]
        assert not (folder / "25").exists()
    assert "never finished" in caplog.text


def test_a_record_of_a_later_format_is_not_guessed_at(folder):
    (path,) = (folder / "20" / "tpukit").iterdir()
    document = json.loads(path.read_text())
    document["record"]["format"] = 99
    path.write_text(json.dumps(document))
    assert "changed after it was written" in TPUCheckpointer(folder).verify(20).problem


@given(st.sets(st.integers(0, 20)), st.integers(1, 20))
def test_records_are_whole_exactly_when_every_process_left_one(present, processes):
    present = {process for process in present if process < processes}
    names = [record_name(process, processes) for process in present]
    problem = missing_records(["notes.txt", *names])
    assert (problem is None) == (present == set(range(processes)))


def test_records_of_two_saves_do_not_make_one():
    assert "2 and 3 processes" in missing_records([record_name(0, 2), record_name(1, 3)])
