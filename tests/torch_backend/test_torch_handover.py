"""The hand-over to torch_tpu: the plan, and its script run on CPU by two processes of torch."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from free_ports import free_port
from jax.sharding import PartitionSpec
from torch import nn
from typer.testing import CliRunner

from tpukit import Job
from tpukit.cli.app import app
from tpukit.errors import ConfigError, TPUModelError, TPUValidationError
from tpukit.torch import write_handover
from tpukit.torch.handover import dtensor_placements, handover_plan

BUILDER = """
import torch
from torch import nn
import torch.nn.functional as functional

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, s, d = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (y.view(b, s, 4, d // 4).transpose(1, 2) for y in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, s, d))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("shift", torch.zeros(32))

    def forward(self, ids):
        x = self.embed(ids) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain

def build():
    return Model()
"""
SHAPE = {"on": "v6e-8", "batch_size": 8, "sequence_length": 16}


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "my_model.py"
    path.write_text(BUILDER)
    return path


def job_of(builder, **changes):
    return Job(model=f"torch:{builder}:build", **{**SHAPE, **changes})


def run_script(script, *arguments):
    """Run the script as two processes; each one's report."""
    report = script.parent / "report"
    report.mkdir()
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [sys.executable, script, "--device", "cpu", *arguments, "--report", report]
    started = [
        subprocess.Popen(
            [str(word) for word in words],
            env={**os.environ, **common, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in started:
            process.kill()
    return [json.loads((report / f"rank-{rank}.json").read_text()) for rank in range(2)]


def eager_losses(builder, plan, script):
    """The same two steps in one process of plain torch."""
    parts = []
    for path in (builder, script):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        parts.append(module)
    torch.manual_seed(plan["train"]["seed"])
    model = parts[0].build()
    optimizer = parts[1].optimizer_of(model, plan["train"])
    losses = []
    for batch in parts[1].batches(model, plan, 2):
        optimizer.zero_grad()
        logits = model(batch["inputs"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan["train"]["clip_norm"])
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        pytest.param({"remat": "full"}, {"fsdp": 2}, id="fsdp"),
        pytest.param(
            {"mesh": "fsdp=4,tensor=2"},
            {"fsdp": 1, "tensor": 2},
            id="tensor",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_script_trains_by_the_plan(builder, tmp_path, changes, sizes):
    written = write_handover(job_of(builder, **changes), tmp_path / "handover")
    plan = json.loads(written.plan.read_text())
    mesh = [f"{name}={size}" for name, size in sizes.items()]
    reports = run_script(written.script, "--steps", 2, "--mesh", *mesh)
    assert reports[0]["losses"] == pytest.approx(reports[1]["losses"], rel=1e-6)
    expected = eager_losses(builder, plan, written.script)
    assert reports[0]["losses"] == pytest.approx(expected, rel=1e-5)
    assert expected[1] != expected[0]
    for report in reports:
        for name, shard in report["shards"].items():
            placed = plan["parameters"][name]
            shape = list(placed["shape"])
            for size, where in zip(sizes.values(), placed["placements"], strict=True):
                if where.startswith("Shard"):
                    shape[int(where[6:-1])] //= size
            assert shard == shape, name
    assert any("Shard" in "".join(one["placements"]) for one in plan["parameters"].values())


def test_the_plan_says_all_that_decides_a_step(builder, tmp_path):
    job = job_of(builder, compile={"xla_optimization_level": 1})
    plan = handover_plan(job, beside=tmp_path)
    assert (tmp_path / plan["model"].removesuffix(":build")).resolve() == builder
    assert (plan["slice"], plan["devices"], plan["mesh"]) == ("v6e-8", 8, {"fsdp": 8})
    assert plan["tied"] == {"head.weight": "embed.weight"}
    assert "shift" not in plan["parameters"]  # a buffer
    assert plan["parameters"]["gain"]["placements"] == ["Replicate()"]
    assert plan["parameters"]["blocks.0.qkv.weight"] == {
        "shape": [96, 32],
        "dtype": "float32",
        "placements": ["Shard(0)"],
    }
    assert plan["batch"]["inputs"]["placements"] == ["Shard(0)"]
    assert plan["flags"]
    assert all(name in plan["environment"]["LIBTPU_INIT_ARGS"] for name in plan["flags"])
    assert plan["versions"]["torch"] == torch.__version__
    assert any("tested on CPU only" in note for note in plan["notes"])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (PartitionSpec(), ["Replicate()", "Replicate()"]),
        (PartitionSpec("fsdp"), ["Shard(0)", "Replicate()"]),
        (PartitionSpec("tensor", "fsdp"), ["Shard(1)", "Shard(0)"]),
        (PartitionSpec(None, ("fsdp", "tensor")), ["Shard(1)", "Shard(1)"]),
    ],
)
def test_placements_as_dtensor_writes_them(spec, expected):
    assert dtensor_placements(spec, 2, ("fsdp", "tensor")) == expected


def test_what_cannot_be_handed_over_is_refused(builder, tmp_path):
    with pytest.raises(TPUValidationError, match="another order"):
        dtensor_placements(PartitionSpec(("tensor", "fsdp")), 1, ("fsdp", "tensor"))
    with pytest.raises(ConfigError, match="a Python object"):
        write_handover(Job(model=nn.Linear(2, 2), **SHAPE), tmp_path)
    with pytest.raises(TPUModelError, match="needs a PyTorch module"):
        write_handover(Job(model="tiny", **SHAPE), tmp_path)
    with pytest.raises(TPUValidationError, match="no pipeline stages"):
        write_handover(job_of(builder, mesh="stage=2,fsdp=4"), tmp_path)


@pytest.mark.parametrize(
    ("typed", "said"),
    [(["tiny"], "needs a PyTorch module"), (["f.py:f", "--arg", "f32[2]"], "a bare function")],
)
def test_the_command_refuses_before_it_compiles(tmp_path, typed, said):
    words = ["check", *typed, "--on", "v6e-4", "--handover", str(tmp_path / "handover")]
    ran = CliRunner().invoke(app, words)
    assert said in str(ran.exception)
    assert "compile" not in ran.stderr
