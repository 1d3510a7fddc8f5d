"""`torch:module:function`: builders of PyTorch modules in jobs, checks, plans and the command."""

import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tpukit import Job
from tpukit.checker.next_command import next_command
from tpukit.cli.app import app
from tpukit.errors import TPUModelError
from tpukit.job.model_source import MEAN_LOSS, is_torch_source, load_model, model_fingerprint
from tpukit.job.step import build_step
from tpukit.planner.search.subject import read_subject
from tpukit.step import Workload
from tpukit.step.traced_flops import model_flops

BUILDERS = """
import torch
from torch import nn

def module():
    return nn.Linear(4, 3)

def pair():
    return nn.Linear(4, 3), torch.zeros(8, 4)

def several():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)
        def forward(self, x, y):
            return self.inner(x) + y
    return Sum(), (torch.zeros(8, 4), torch.zeros(8, 3))

def with_targets():
    return nn.Linear(4, 3), {"input": torch.zeros(8, 4), "targets": torch.zeros(8).long()}

def needs_values():
    return nn.Linear(int(torch.ones(4).sum().item()), 3)

def workload():
    from tpukit.step import Workload
    import jax
    shape = jax.ShapeDtypeStruct((8, 4), "f4")
    loss = lambda outputs, batch: outputs.sum()
    return Workload(nn.Linear(4, 3), batch={"input": shape}, inputs=("input",), loss=loss)

def number():
    return 3

def nothing():
    return None

def no_tensor():
    return nn.Linear(4, 3), {"input": "text"}

def fails():
    raise KeyError("q")

def huge():
    return nn.ModuleList(nn.Linear(100_000, 100_000) for _ in range(100))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "builders.py").write_text(BUILDERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named(function):
    return f"torch:builders.py:{function}"


def test_the_prefix_is_not_a_module_of_torch_itself():
    assert is_torch_source("torch:my.py:build")
    assert not is_torch_source("torch:ones")
    assert not is_torch_source("my.py:build")


def test_a_model_of_any_size_is_built_without_memory(folder):
    huge = load_model(named("huge"), {}, values=False)
    assert sum(one.numel() for one in huge.parameters()) > 1e12
    assert all(one.is_meta for one in huge.parameters())


def test_a_model_that_will_train_has_values(folder):
    assert not load_model(named("module"), {}).weight.is_meta


def test_a_builder_that_needs_values_gets_them(folder, caplog):
    with caplog.at_level(logging.INFO, "tpukit"):
        found = load_model(named("needs_values"), {}, values=False)
    assert not found.weight.is_meta
    assert "needs values to be built" in caplog.text


@pytest.mark.parametrize(
    ("function", "batch", "inputs"),
    [
        ("pair", {"input": (8, 4)}, ("input",)),
        ("several", {"x": (8, 4), "y": (8, 3)}, ("x", "y")),
        ("with_targets", {"input": (8, 4), "targets": (8,)}, ("input",)),
    ],
)
def test_sample_inputs_become_the_batch(folder, function, batch, inputs):
    work = load_model(named(function), {}, values=False)
    assert isinstance(work, Workload)
    assert {name: one.shape for name, one in work.batch_shapes().items()} == batch
    assert work.inputs == inputs


def test_the_flops_of_a_module_are_those_of_its_products(folder):
    work = load_model(named("with_targets"), {}, values=False)
    # A layer of 4 inputs and 3 outputs on 8 rows: forward, and for the gradient of its weight.
    assert model_flops(work).value == 2 * (2 * 8 * 4 * 3)


def test_without_a_loss_it_is_the_mean_of_the_first_output_and_says_so(folder):
    step = build_step(Job(model=named("pair"), on="v6e-8"))
    assert MEAN_LOSS in step.notes
    inputs = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    state = step.work.init(jax.random.key(0))
    _, metrics = jax.jit(step.work.train_step)(state, {"input": inputs})
    with torch.no_grad():
        eager = step.work.model(torch.tensor(inputs)).mean().item()
    assert metrics["loss"] == pytest.approx(eager, rel=1e-5)
    assert MEAN_LOSS not in build_step(Job(model=named("with_targets"), on="v6e-8")).notes


def test_a_workload_of_a_module_is_taken_as_it_is(folder):
    assert isinstance(load_model(named("workload"), {}).model, nn.Linear)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("number", "returned an int; --torch takes a function that returns an nn.Module"),
        ("nothing", "returned None"),
        ("no_tensor", "returns a str as input 'input'"),
        ("fails", r"raised KeyError: 'q' \(builders.py:\d+: raise"),
    ],
)
def test_what_is_no_module_is_refused(folder, function, said):
    with pytest.raises(TPUModelError, match=said):
        load_model(named(function), {}, values=False)


def test_another_source_is_another_job(folder):
    before = model_fingerprint(named("module"))
    assert torch.__version__ in before
    (folder / "builders.py").write_text(BUILDERS + "\n")
    assert model_fingerprint(named("module")) != before


def test_a_plan_takes_a_bare_module_one_example_a_device(folder):
    subject = read_subject(named("module"), sequence_length=None)
    assert (subject.known, subject.sequence_length, subject.fixed_examples) == (None, 2048, None)
    fixed = read_subject(named("pair"), sequence_length=None)
    assert fixed.fixed_examples == 8


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["tiny", "--torch", "builders.py:module"], "both a TARGET and --torch"),
        ([], "nothing to check"),
        (["--torch", "builders.py:number"], "returned an int"),
        (["--torch", "builders.py:missing"], "'missing' does not exist"),
    ],
)
def test_the_command_refuses_in_one_line(folder, typed, said):
    ran = CliRunner().invoke(app, ["check", "--on", "v6e-8", *typed])
    assert ran.exit_code != 0
    assert said in str(ran.exception)


def test_a_module_that_does_not_fit_is_told_of_remat():
    compiled = SimpleNamespace(fits=False)
    result = SimpleNamespace(
        target="torch:my.py:build",
        asked={"on": "v6e-1"},
        job=None,
        captured=None,
        fixes=None,
        compiled=compiled,
    )
    assert next_command(result) == "tpukit check torch:my.py:build --on v6e-1 --remat full"
    result.asked["remat"] = "full"
    assert next_command(result).endswith("--html report.html")
