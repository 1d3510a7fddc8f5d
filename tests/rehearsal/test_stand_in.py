"""What is trained here in the place of a job: the job where it is small, else one of its kind."""

import json
from pathlib import Path

import pytest

from tpukit.checker.compiling import lower_job
from tpukit.errors import ConfigError
from tpukit.job import Job
from tpukit.rehearsal.rehearse import default_job
from tpukit.rehearsal.stand_in import (
    MOST_DEVICES,
    MOST_PARAMETERS,
    config_of,
    make_stand_in,
    write_own_source,
)

LARGE = [
    {"model": "llama3.1-8b", "on": "v6e-8", "batch_size": 24},
    {"model": "mixtral-8x7b", "on": "v6e-256", "mesh": {"fsdp": 32, "tensor": 8},
     "strategy": "fsdp+megatron", "batch_size": 256},
    {"model": "llama3.1-70b", "on": "2xv5p-128", "mesh": {"data": 2, "fsdp": 64},
     "dcn_mesh": (2, 1)},
    {"model": "llama3.1-8b", "on": "tpu7x-4x4x4", "microbatches": 2},
    {"model": "llama3.1-8b", "on": "v5p-16", "mesh": {"stage": 2, "fsdp": 4}, "microbatches": 4,
     "batch_size": 32},
]  # fmt: skip


def stand_in(said, **how):
    return make_stand_in(Job.from_dict(said), **{"steps": 60, "folder": Path("there"), **how})


@pytest.mark.parametrize("said", LARGE, ids=lambda said: f"{said['model']} {said['on']}")
def test_a_large_job_gets_a_small_one_of_its_kind(said):
    job, found = Job.from_dict(said), stand_in(said)
    small = found.job
    assert not found.is_same_model
    assert config_of(small).parameter_count().total <= MOST_PARAMETERS
    assert small.slice.chip == job.slice.chip
    assert small.slice.devices <= MOST_DEVICES
    split = [axis for axis, size in job.mesh_sizes.items() if size > 1]
    kept = [axis for axis, size in small.mesh_sizes.items() if size > 1]
    assert kept == split
    assert small.strategy == job.strategy
    assert small.microbatches == job.microbatches
    assert small.examples % (small.batch_ways * small.microbatches) == 0
    assert bool(config_of(small).n_experts) == bool(config_of(job).n_experts)
    named = " ".join(found.differences)
    assert config_of(job).name in named
    assert f"{config_of(job).parameter_count().total:,}" in named


@pytest.mark.slow
@pytest.mark.parametrize("said", LARGE, ids=lambda said: f"{said['model']} {said['on']}")
def test_a_small_one_can_be_compiled(said):
    """Every dimension divides over its axes, which lowering the step for its slice finds out."""
    assert lower_job(stand_in(said).job, remember=False) is not None


def test_how_it_learns_stays():
    said = {**LARGE[0], "train": {"optimizer": "lion", "learning_rate": 1e-3, "steps": 9000,
            "warmup_steps": 500, "run_dir": "/shared/run", "hooks": ["wandb"],
            "checkpoint_every": 1000, "beta2": 0.99}}  # fmt: skip
    train = stand_in(said).job.train
    assert (train.optimizer, train.learning_rate, train.beta2) == ("lion", 1e-3, 0.99)
    assert (train.steps, train.warmup_steps, train.checkpoint_every) == (60, 6, 10)
    assert train.run_dir is None, "a rehearsal writes to its own folder"
    assert train.hooks == ("profile",), "and tells nobody else"


def test_what_it_starts_from_is_left_out_and_said():
    found = stand_in({**LARGE[0], "train": {"init_from": "weights", "lora": {"rank": 4}}})
    assert found.job.train.init_from is found.job.train.lora is None
    assert sum("is left out" in one for one in found.differences) == 2


def test_nothing_of_the_launch_is_taken():
    """Not a secret, not a command for hosts: the hosts of a rehearsal are this machine."""
    launch = {"environment": {"TOKEN": "secret"}, "setup": [["rm", "-rf", "/"]], "project": "mine"}
    found = stand_in({**LARGE[0], "launch": launch})
    assert found.job.launch.model_fields_set == set()
    assert "secret" not in json.dumps(found.to_dict())


def test_a_small_job_is_trained_as_it_is(tmp_path):
    data = tmp_path / "text.jsonl"
    data.write_text('{"text": "abc"}\n')
    said = {"model": {"preset": "tiny", "vocab_size": 257}, "on": "v6e-4", "batch_size": 4,
            "sequence_length": 32, "train": {"data": str(data), "tokenizer": "bytes"}}  # fmt: skip
    found = stand_in(said)
    assert found.is_same_model
    assert found.corpus is None
    assert (found.job.train.data, found.job.train.tokenizer) == (str(data), "bytes")
    for key in ("model", "model_changes", "on", "mesh", "batch_size", "sequence_length"):
        assert getattr(found.job, key) == getattr(Job.from_dict(said), key)


def test_data_that_is_not_here_gets_a_text_in_its_place():
    found = stand_in({"model": "tiny", "on": "v6e-4", "train": {"data": "gs://bucket/tokens"}})
    assert found.job.train.data == str(found.corpus)
    assert "it learns the text of tpukit's own source, as bytes" in found.differences


def test_a_small_model_with_many_tokens_gets_fewer():
    found = stand_in({"model": "tiny", "on": "v6e-4", "batch_size": 4096, "sequence_length": 64})
    assert found.is_same_model
    assert found.job.tokens_per_step < 16_384


def test_a_model_of_ones_own_that_takes_too_much_is_refused():
    said = {"model": "own.py:build", "on": "v6e-4", "batch_size": 4096, "sequence_length": 64}
    with pytest.raises(ConfigError, match=r"takes 262,144 tokens per step; .* 16,384 at most"):
        stand_in(said)


def test_a_mesh_of_many_axes_is_refused_with_the_way_out():
    mesh = {"data": 2, "fsdp": 2, "tensor": 2, "sequence": 2, "expert": 2}
    with pytest.raises(ConfigError, match="takes 32 devices at least"):
        stand_in({"model": "mixtral-8x7b", "on": "v6e-32", "mesh": mesh, "batch_size": 32})


def test_the_default_job_is_trained_as_it_is():
    found = make_stand_in(default_job(), steps=60, folder=Path("there"))
    assert found.is_same_model
    assert found.job.model_changes == default_job().model_changes


def test_the_text_is_the_same_every_time(tmp_path):
    for name in "ab":
        write_own_source(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    documents = [json.loads(line)["text"] for line in (tmp_path / "a").read_text().splitlines()]
    assert sum(map(len, documents)) > 1_000_000
