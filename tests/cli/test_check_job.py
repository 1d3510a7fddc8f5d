"""Job files: what they may say, and what a wrong one is told."""

import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.cli.check_job import CheckJob, parse_mesh, refuse_unknown_preset
from tpukit.errors import ConfigError, MeshError, SliceError, TPUValidationError

JOB = """
model: tiny
slice: v6e-8
batch_size: 16
sequence_length: 64
mesh: {fsdp: 4, tensor: 2}
remat: full
"""


def test_a_job_file_round_trips(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    job = CheckJob.from_yaml(path)
    assert job.mesh_sizes == {"fsdp": 4, "tensor": 2}
    assert CheckJob.from_dict(job.to_dict()) == job
    assert CheckJob.from_yaml(path, batch_size=32, remat=None).batch_size == 32
    assert job.replace(remat="none").remat == "none"
    changed = job.replace(model={"preset": "tiny", "n_layers": 3})
    assert changed.model_changes == {"n_layers": 3}
    assert changed.to_dict()["model"] == {"preset": "tiny", "n_layers": 3}
    assert changed.workload.config.n_layers == 3


def test_what_a_job_leaves_out_follows_from_its_mesh():
    job = CheckJob.from_dict({"model": "tiny", "slice": "v6e-8"})
    assert job.mesh_sizes == {"fsdp": 8}
    assert job.examples == 8
    assert job.tokens_per_step == 8 * 2048
    mixed = CheckJob.from_dict({"model": "tiny", "slice": "v6e-8", "mesh": "fsdp=-1,tensor=2"})
    assert mixed.replace(sequence_length=64).workload.strategy == "fsdp+megatron"
    assert mixed.examples == 4
    shape = mixed.replace(sequence_length=64).shape()
    assert shape.batch_ways == 4
    assert shape.layer_inputs_bytes == 2 * 64 * 64 * 4  # layers x tokens x width x float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bacth_size": 8}, r"'bacth_size' is not a key of a job.*Did you mean 'batch_size'"),
        ({"batch_size": 0}, r"batch_size is 0"),
        ({"batch_size": "many"}, r"batch_size is 'many'"),
        ({"optimizer": "adamv"}, r"Did you mean 'adamw'"),
        ({"optimizer": "sgd mu=bfloat16"}, r"adamw mu=bfloat16"),
        ({"mesh": [8]}, r"sizes by axis"),
        ({"slice": None}, r"needs 'slice', for example slice: v6e-8 \(or --on"),
        ({"model": {"n_layers": 2}}, r"needs 'model'"),
    ],
)
def test_wrong_jobs_are_told_what_is_right(change, message):
    with pytest.raises(ConfigError, match=message):
        CheckJob.from_dict({"model": "tiny", "slice": "v6e-8", **change})


def test_meshes_and_slices_are_checked_at_once():
    with pytest.raises(MeshError, match="has 4 devices, but v6e-8 has 8"):
        CheckJob.from_dict({"model": "tiny", "slice": "v6e-8", "mesh": "fsdp=4"})
    with pytest.raises(SliceError):
        CheckJob.from_dict({"model": "tiny", "slice": "v6e-7"})
    assert parse_mesh("fsdp=-1, tensor=4") == {"fsdp": -1, "tensor": 4}
    for wrong in ("fsdp", "fsdp=", "=8", "fsdp=8,fsdp=2", "fsdp=x"):
        with pytest.raises(MeshError):
            parse_mesh(wrong)


@given(st.text(alphabet="fsdp=-18, tensor") | st.text())
def test_any_text_is_a_mesh_or_a_clear_error(text):
    with suppress(MeshError):
        assert all(isinstance(size, int) for size in parse_mesh(text).values())


def test_files_that_are_no_jobs(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        CheckJob.from_yaml(tmp_path / "none.yaml")
    path = tmp_path / "job.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        CheckJob.from_yaml(path)
    path.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="holds no job"):
        CheckJob.from_yaml(path)


def test_an_unknown_target_is_guessed():
    with pytest.raises(TPUValidationError, match=r"no preset.*Did you mean 'llama3\.1-8b'"):
        refuse_unknown_preset("llama3.1-8B")


def test_the_key_changes_with_the_job_and_the_versions(monkeypatch):
    job = CheckJob.from_dict({"model": "tiny", "slice": "v6e-8"})
    same = CheckJob.from_dict({"slice": "v6e-8", "model": "tiny"})
    before = job.key
    assert same.key == before
    assert job.replace(remat="none").key != before
    monkeypatch.setattr("tpukit.cli.check_job.version", lambda name: "9.9")
    assert job.key != before


def test_reading_a_job_needs_no_jax():
    code = (
        "import sys; from tpukit.cli.check_job import CheckJob\n"
        "CheckJob.from_dict({'model': 'tiny', 'slice': 'v6e-8', 'batch_size': 8}).key\n"
        "assert 'jax' not in sys.modules and 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
