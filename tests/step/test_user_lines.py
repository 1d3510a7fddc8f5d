"""Errors of a user's own model name the line of the user's file, in every framework."""

import json
import re

import jax
import pytest

from tpukit.compiler.program.lowered import lower_program
from tpukit.errors import TPUModelError
from tpukit.job import Job
from tpukit.job.model_source import load_model
from tpukit.job.step import build_step
from tpukit.parallel import create_mesh
from tpukit.runtime.user_code import user_line
from tpukit.training.evaluation import jit_eval_step

FILE = """
import equinox
import jax
import jax.numpy as jnp
from flax import linen, nnx
from tpukit import Workload

BATCH = {
    "inputs": jax.ShapeDtypeStruct((4, 8), jnp.float32),
    "targets": jax.ShapeDtypeStruct((4,), jnp.int32),
}

class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.narrow = nnx.Linear(8, 3, rngs=rngs)
        self.wide = nnx.Linear(8, 4, rngs=rngs)
    def __call__(self, x):
        return self.wide(self.narrow(x))  # nnx

class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        y = linen.Dense(4)(x)
        if y.sum() > 0:  # linen
            return -y
        return y

class Equinox(equinox.Module):
    weight: jax.Array
    def __call__(self, x):
        return self.weight @ x[:3]  # equinox

def init(rng):
    return {"w": jnp.zeros((8, 4))}

def apply(params, batch):
    return batch["inputs"] @ params["v"]  # functions

def right(params, batch):
    return batch["inputs"] @ params["w"]

def wrong_loss(outputs, batch):
    return outputs.sum() + batch["labels"]  # loss

def wrong_init(rng):
    return {"w": jnp.zeros((8, 4)) + jnp.zeros(3)}  # init

def nnx_(): return Workload(Nnx, batch=BATCH)
def linen_(): return Workload(Linen(), batch=BATCH)
def equinox_(): return Workload(Equinox(jnp.zeros((4, 8))), batch=BATCH)
def functions_(): return Workload((init, apply), batch=BATCH)
def loss_(): return Workload((init, right), batch=BATCH, loss=wrong_loss)
def init_(): return Workload((wrong_init, right), batch=BATCH)
def builder_(): return nnx.Linear(8, "x", rngs=nnx.Rngs(0))  # builder
"""
KINDS = ["nnx", "linen", "equinox", "functions", "loss", "init"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    folder = tmp_path / "tpukit"  # a folder of the package's name is the user's own
    folder.mkdir()
    (folder / "own.py").write_text(FILE)
    monkeypatch.chdir(folder)
    return folder / "own.py"


def line_of(file, kind):
    number, text = next(
        (number, line.strip())
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if line.endswith(f"# {kind}")
    )
    return re.escape(f"(own.py:{number}: {text})")


def traced(kind):
    work = build_step(Job(model=f"own.py:{kind}_")).work
    return jax.eval_shape(work.train_step, work.state_shapes(), work.batch_shapes())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_names_the_line(file, kind):
    with pytest.raises(TPUModelError, match=f"cannot be traced: .*{line_of(file, kind)}"):
        traced(kind)


def test_a_builder_names_the_line(file):
    with pytest.raises(TPUModelError, match=line_of(file, "builder")):
        load_model("own.py:builder_", {})


def test_evaluations_and_compiled_functions_name_it_too(file):
    work = load_model("own.py:functions_", {})
    mesh = create_mesh({"data": 1}, devices=jax.devices()[:1])
    state, batch = work.abstract_args(mesh)
    with pytest.raises(TPUModelError, match=line_of(file, "functions")):
        jit_eval_step(work, mesh).lower(state.params, state.model_state, batch)
    _, apply = work.model
    with pytest.raises(TPUModelError, match=line_of(file, "functions")):
        lower_program(apply, state.params, batch)


def test_lines_of_libraries_are_nobodys():
    with pytest.raises(ValueError) as caught:
        json.loads("{")
    assert "test_user_lines.py" in user_line(caught.value)
    inside = caught.value.with_traceback(caught.value.__traceback__.tb_next)
    assert user_line(inside) == ""
