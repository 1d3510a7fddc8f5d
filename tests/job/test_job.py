"""Job files: what they may say, and what a wrong one is told."""

import json
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.checker.job_fixes import JobShape
from tpukit.errors import ConfigError, MeshError, SliceError, TPUModelError, TPUValidationError
from tpukit.hardware.mesh_sizes import parse_mesh
from tpukit.job import Job, build_step
from tpukit.job.model_source import is_huggingface, refuse_unknown_model
from tpukit.job.train import LoraSettings
from tpukit.models import get_preset
from tpukit.models.huggingface.config import config_to_huggingface

JOB = """
model: tiny
on: v6e-8
batch_size: 16
sequence_length: 64
mesh: {fsdp: 4, tensor: 2}
remat: full
"""


def test_a_job_file_round_trips(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    job = Job.from_yaml(path)
    assert job.mesh_sizes == {"fsdp": 4, "tensor": 2}
    assert Job.from_dict(job.to_dict()) == job
    assert Job.from_yaml(path, batch_size=32, remat=None).batch_size == 32
    assert job.replace(remat="none").remat == "none"
    changed = job.replace(model={"preset": "tiny", "n_layers": 3})
    assert changed.model_changes == {"n_layers": 3}
    assert changed.to_dict()["model"] == {"preset": "tiny", "n_layers": 3}
    assert build_step(changed).work.config.n_layers == 3


def test_a_plan_writes_the_file_it_is_read_from(tmp_path):
    plan = Job.from_dict(
        {
            "model": {"preset": "tiny", "n_layers": 3},
            "on": "2xv6e-8",
            "mesh": {"data": 2, "fsdp": 8},
            "dcn_mesh": [2, 1],
            "train": {"steps": 10},
        }
    )
    plan.to_yaml(tmp_path / "job.yaml")
    assert Job.from_yaml(tmp_path / "job.yaml") == plan
    assert "remat" not in (tmp_path / "job.yaml").read_text()
    assert plan.train.steps == 10
    assert plan.key == plan.replace({"train.log_every": 20}).key  # the same program
    assert plan.key != plan.replace({"train.steps": 20}).key  # another schedule
    assert plan.key != plan.replace({"train.z_loss": 1e-4}).key


def test_own_models_and_config_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_to_huggingface(get_preset("tiny"))))
    plan = Job(model=str(tmp_path), on="v6e-8", sequence_length=64)
    assert build_step(plan).work.config.d_model == get_preset("tiny").d_model
    builder = tmp_path / "mine.py"
    builder.write_text(
        "from tpukit.models import get_preset\ndef build(): return get_preset('tiny')"
    )
    own = Job(model=f"{builder}:build", on="v6e-8", sequence_length=64)
    assert build_step(own).work.config.n_layers == 2
    before = own.key
    builder.write_text(builder.read_text() + "\n")
    assert Job(model=own.model, on="v6e-8", sequence_length=64).key != before
    with pytest.raises(ConfigError, match="builds its own model"):
        build_step(own.replace(model={"preset": own.model, "n_layers": 4}))
    with pytest.raises(TPUModelError, match=r"nowhere/config\.json cannot be read"):
        build_step(Job(model=f"{tmp_path}/nowhere", on="v6e-8"))
    with pytest.raises(ConfigError, match="needs 'on'"):
        _ = Job(model="tiny").slice


def test_what_a_job_leaves_out_follows_from_its_mesh():
    job = Job.from_dict({"model": "tiny", "on": "v6e-8"})
    assert job.mesh_sizes == {"fsdp": 8}
    assert job.examples == 8
    assert job.tokens_per_step == 8 * get_preset("tiny").max_seq_len  # shorter than 2048
    mixed = Job.from_dict({"model": "tiny", "on": "v6e-8", "mesh": "fsdp=-1,tensor=2"})
    assert build_step(mixed.replace(sequence_length=64)).work.strategy == "fsdp+megatron"
    assert mixed.examples == 4
    shape = JobShape.of(mixed.replace(sequence_length=64))
    assert shape.batch_ways == 4
    assert shape.layer_inputs_bytes == 2 * 64 * 64 * 4  # layers x tokens x width x float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bacth_size": 8}, r"sets 'bacth_size'.*Did you mean 'batch_size'"),
        ({"batch_size": 0}, r"batch_size=0 is not valid: accepted are 1 to 2,147,483,647"),
        ({"batch_size": "many"}, r"batch_size='many' is not valid"),
        ({"optimizer": "adamw"}, r"Did you mean 'train.optimizer'"),
        ({"train": {"optimizer": "adamv"}}, r"Did you mean 'adamw'"),
        ({"train": {"z_los": 1e-4}}, r"sets 'train.z_los'.*Did you mean 'train.z_loss'"),
        ({"train.learning_rat": 1e-4}, r"Did you mean 'train.learning_rate'"),
        ({"compile": {"xla_optimization_level": 7}}, r"xla_optimization_level=7"),
        ({"mesh": [8]}, r"sizes by axis"),
        ({"mesh": {"fsdp": "x"}}, r"mesh axis fsdp is 'x'"),
        ({"on": 8}, r"on=8 is not valid"),
        ({"train": 3}, r"train is 3, but it is a section"),
        ({"launc": {}}, r"Did you mean 'launch'"),
        ({"model": {"n_layers": 2}}, r"needs 'model'"),
    ],
)
def test_wrong_jobs_are_told_what_is_right(change, message):
    with pytest.raises(ConfigError, match=message):
        Job.from_dict({"model": "tiny", "on": "v6e-8", **change})


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["train:", "  optimzer: lion"], r":4 sets 'train.optimzer'.* 'train.optimizer'"),
        (["compile:", "  use_colective_matmul: true"], r":4 .* 'compile.use_collective_matmul'"),
        (["observe:", "  enable_profilin: true"], r":4 .* 'observe.enable_profiling'"),
        (["launch:", "  zon: a"], r":4 sets 'launch.zon'.* 'launch.zone'"),
        (
            ["train:", "  steps: 3", "  lora:", "    rnk: 3"],
            r":6 .*Did you mean 'train.lora.rank'\?",
        ),
        (["observe:", "  scaling_config:", "    load_treshold: 1"], r":5 .*load_threshold'\?"),
        (
            ["launch:", "  limits:", "    - {zone: a}", "    - zon: a"],
            r":6 .*'launch.limits.1.zone'",
        ),
        (["model: {preset: tiny, n_layer: 4}"], r":3 sets 'model.n_layer'.* 'model.n_layers'"),
    ],
)
def test_an_unknown_key_in_any_section_has_its_line_and_the_nearest(lines, told, tmp_path):
    path = tmp_path / "job.yaml"
    head = ["on: v6e-8", "batch_size: 8" if lines[0].startswith("model") else "model: tiny"]
    path.write_text("\n".join([*head, *lines, ""]))
    with pytest.raises(ConfigError, match=r"job\.yaml" + told):
        Job.from_yaml(path)


def test_meshes_and_slices_are_checked_at_once():
    with pytest.raises(MeshError, match="has 4 devices, but v6e-8 has 8"):
        Job.from_dict({"model": "tiny", "on": "v6e-8", "mesh": "fsdp=4"})
    with pytest.raises(SliceError):
        Job.from_dict({"model": "tiny", "on": "v6e-7"})
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
        Job.from_yaml(tmp_path / "none.yaml")
    path = tmp_path / "job.yaml"
    path.write_text("model: tiny\na: [1, 2\nb: 3\n")
    with pytest.raises(ConfigError, match=r"not valid YAML: line 3, column 2, expected ','"):
        Job.from_yaml(path)
    path.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="is a list"):
        Job.from_yaml(path)


def test_an_unknown_target_is_guessed():
    with pytest.raises(TPUValidationError, match=r"is not a model.*Did you mean 'llama3\.1-8b'"):
        refuse_unknown_model("llama3.1-8B")


def test_the_key_changes_with_the_job_and_the_versions(monkeypatch):
    job = Job.from_dict({"model": "tiny", "on": "v6e-8"})
    same = Job.from_dict({"on": "v6e-8", "model": "tiny"})
    before = job.key
    assert same.key == before
    assert job.replace(remat="none").key != before
    monkeypatch.setattr("tpukit.runtime.versions.version", lambda name: "9.9")
    assert Job.from_dict({"model": "tiny", "on": "v6e-8"}).key != before
    assert job.key == before  # a job is resolved once


def test_reading_a_job_needs_no_jax():
    code = (
        "import sys; from tpukit.job.job import Job\n"
        "Job.from_dict({'model': 'tiny', 'on': 'v6e-8', 'batch_size': 8}).key\n"
        "assert 'jax' not in sys.modules and 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_keys_within_a_value_are_named_by_dotted_path():
    job = Job.from_dict({"model": "tiny", "train": {"lora": {"rank": 4}}})
    wider = job.replace({"train.lora.base": "int4", "train.lora.rank": 8})
    assert wider.train.lora == LoraSettings(rank=8, base="int4")
    assert Job.from_dict({"model": "tiny", "train.lora.rank": 2}).train.lora.rank == 2
    with pytest.raises(ConfigError, match=r"Did you mean 'train.lora.rank'\?"):
        Job.from_dict({"model": "tiny", "train.lora.rnk": 2})


def test_folders_of_quantized_models_need_no_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few-bits").mkdir()
    assert not is_huggingface("few-bits")
    (tmp_path / "few-bits/quantized.json").write_text("{}")
    assert is_huggingface("few-bits")
