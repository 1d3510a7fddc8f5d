"""Compiles of this folder go to a cache of their own, and one small training step is shared."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tpukit.compiler import compile_for

WIDTH, HIDDEN, EXAMPLES, DEVICES = 1024, 4096, 8192, 8


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def training_step(state, batch):
    def loss(params):
        hidden = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["up"].astype(jnp.bfloat16))
        return jnp.mean((hidden @ params["down"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    gradients = jax.grad(loss)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt_state"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "opt_state": momentum}, state["table"] + 1.0


def training_arguments():
    mesh = AbstractMesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    def leaf(*sizes, spec=()):
        place = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=place)

    weights = {
        "up": leaf(WIDTH, HIDDEN, spec=(None, "data")),
        "down": leaf(HIDDEN, WIDTH, spec=("data", None)),
    }
    state = {"params": weights, "opt_state": weights, "table": leaf(2048, 1024)}
    return state, {"x": leaf(EXAMPLES, WIDTH, spec=("data", None))}


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A small training step through the real compiler, with every file it left and its stages."""
    folder = tmp_path_factory.mktemp("trained")
    stages = []
    compiled = compile_for(
        training_step,
        "v6e-8",
        *training_arguments(),
        until="memory",
        progress=stages.append,
        use_cache=False,
        dump_to=folder,
    )
    (report,) = folder.glob("*.jit_call.*-memory-usage-report.txt")
    total = next(line for line in report.read_text().splitlines() if line.startswith("Total"))
    return SimpleNamespace(
        compiled=compiled,
        stages=stages,
        folder=folder,
        reported_total=int(total.split()[2]),
        devices=json.loads((folder / "devices.json").read_text()),
    )
