"""A job on another slice than it was written for, and the ways to name a model of one's own."""

import logging

import pytest

from tpukit.errors import MeshError, TPUModelError, TPUValidationError
from tpukit.job import Job
from tpukit.job.model_source import load_model
from tpukit.job.reading import read_job
from tpukit.planner.planning import plan


def test_the_default_mesh_follows_the_slice():
    assert Job(model="tiny", on="v6e-8").mesh_sizes == {"fsdp": 8}
    several = Job(model="tiny", on="2xv6e-256")
    assert several.mesh_sizes == {"data": 2, "fsdp": 256}
    assert "mesh" not in several.to_dict()  # nobody stated it, and another slice has another
    assert several.replace(on="v6e-16").mesh_sizes == {"fsdp": 16}
    assert Job.from_dict(several.to_dict()) == several
    for mesh in ({"fsdp": 512}, {"fsdp": -1}):
        stated = Job(model="tiny", on="2xv6e-256", mesh=mesh)
        assert Job.from_dict(stated.to_dict()).mesh_sizes == {"fsdp": 512}


def test_two_spellings_of_a_mesh_are_one_program():
    keys = {
        Job(model="tiny", on="v6e-8", **mesh).key
        for mesh in ({}, {"mesh": {"fsdp": -1}}, {"mesh": {"fsdp": 8}})
    }
    assert len(keys) == 1
    assert Job(model="tiny", on="v6e-8", mesh={"data": 8}).key not in keys


def test_a_file_for_one_slice_can_be_asked_about_another(tmp_path, caplog):
    path = tmp_path / "job.yaml"
    path.write_text("model: tiny\non: v5p-256\nmesh: {fsdp: 32, tensor: 4}\ndcn_mesh: [1, 1]\n")
    with caplog.at_level(logging.WARNING, "tpukit"):
        job = read_job(str(path), {"on": "v5p-128"}, environment={})
    assert job.mesh_sizes == {"fsdp": 16, "tensor": 4}
    assert "fsdp=32,tensor=4" in caplog.text
    assert "fsdp=16,tensor=4" in caplog.text
    assert read_job(str(path), {"on": "2xv5p-128"}, environment={}).dcn_mesh is None
    assert read_job(str(path), {}, environment={}).mesh_sizes["fsdp"] == 32
    # What is typed is taken at its word, and refused with one that would do.
    with pytest.raises(MeshError, match="but v5p-128 has 64 devices; write fsdp=64, or -1"):
        read_job(str(path), {"on": "v5p-128", "mesh": "fsdp=128"}, environment={})
    with pytest.raises(MeshError, match="write data=2,fsdp=256, or -1"):
        Job(model="tiny", on="2xv6e-256", mesh={"tensor": 3})


def test_a_plans_job_leaves_the_mesh_open(tmp_path):
    found = plan("llama3.1-8b", tokens=1e9, on="v5p-256", verify=0)
    found.to_yaml(tmp_path / "job.yaml")
    job = Job.from_yaml(tmp_path / "job.yaml")
    assert -1 in job.mesh.values()
    assert job.mesh_sizes == found.best.mesh
    smaller = read_job(str(tmp_path / "job.yaml"), {"on": "v5p-128"}, environment={})
    assert smaller.slice.devices == 64


BUILDERS = """
import neighbour
from tpukit import Workload
from tpukit.models import get_preset

def work():
    return Workload(get_preset("tiny"), batch_size=8, sequence_length=neighbour.LENGTH)

def config():
    return get_preset("tiny", n_layers=neighbour.LENGTH)

ready = work()
"""


@pytest.fixture
def builders(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "builders.py").write_text(BUILDERS)
    (folder / "neighbour.py").write_text("LENGTH = 16\n")
    return folder


def test_a_model_of_ones_own_is_named_from_any_folder(builders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_model("models/builders.py:work", {}).sequence_length == 16
    assert load_model("models/builders.py:ready", {}).sequence_length == 16
    assert load_model("models/builders.py:config", {}).n_layers == 16
    (builders / "job.yaml").write_text("model: builders.py:work\non: v6e-8\n")
    job = read_job("models/job.yaml", {}, environment={})
    assert (job.model, job.tokens_per_example) == ("models/builders.py:work", 16)


def test_a_folder_of_a_model_and_other_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,'
        '"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}'
    )
    for name in ("mine", "mine/", "mine/config.json"):
        assert load_model(name, {}).d_model == 64
    (tmp_path / "other.json").write_text('{"verdict": "fits"}')
    with pytest.raises(TPUModelError, match=r"is not a Hugging Face config: .* model_type"):
        load_model("other.json", {})
    with pytest.raises(TPUValidationError, match=r"is not a model; expected a preset"):
        load_model("nothing", {})
