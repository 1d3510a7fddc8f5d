"""z-loss reaches the whole and the cut loss alike; somebody's own model computes narrow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpukit.errors import TPUModelError
from tpukit.parallel.mesh.mesh import create_mesh
from tpukit.step.workload import Workload
from tpukit.training.evaluation import jit_eval_step


def squared_normaliser(logits):
    wide = np.asarray(logits, np.float64)
    return float(np.mean(np.log(np.exp(wide).sum(-1)) ** 2))


@pytest.mark.parametrize("chunks", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_z_loss_adds_the_squared_normaliser(chunks):
    plain = Workload("tiny", batch_size=2, sequence_length=16, loss_chunks=chunks)
    with_z = plain.replace(z_loss=0.01)
    state, batch = plain.init(jax.random.key(0)), plain.example_batch()
    losses = [jax.jit(work.train_step)(state, batch)[1]["loss"] for work in (plain, with_z)]
    model = plain.adapter.module(state.params, plain.execution)
    expected = 0.01 * squared_normaliser(model(batch["inputs"]))
    assert float(losses[1] - losses[0]) == pytest.approx(expected, rel=1e-4)


def own_model(**options):
    seen = {}

    def init(rng):
        return {"w": jax.random.normal(rng, (4, 4))}

    def apply(params, batch):
        seen["dtype"] = params["w"].dtype
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    shapes = {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    return Workload((init, apply), batch=shapes, optimizer=optax.sgd(0.1), **options), seen


def test_own_model_computes_narrow_and_keeps_wide_masters():
    work, seen = own_model(compute_dtype="bfloat16")
    state, metrics = jax.jit(work.train_step)(work.init(jax.random.key(0)), work.example_batch())
    assert seen["dtype"] == jnp.bfloat16
    assert state.params["w"].dtype == metrics["loss"].dtype == jnp.float32
    wide, _ = own_model()
    _, expected = wide.train_step(wide.init(jax.random.key(0)), wide.example_batch())
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=2.0**-8)
    assert float(metrics["loss"]) != float(expected["loss"])


def test_compute_dtype_is_not_for_the_reference_transformer():
    with pytest.raises(TPUModelError, match=r"config\.replace\(dtype='bfloat16'\)"):
        Workload("tiny", batch_size=2, sequence_length=16, compute_dtype="bfloat16")
    with pytest.raises(TPUModelError, match="compute_dtype='int8'"):
        own_model(compute_dtype="int8")[0].init(jax.random.key(0))


@pytest.mark.slow
def test_eval_loss_is_the_training_loss_without_the_extras():
    work = Workload("tiny", batch_size=8, sequence_length=16, z_loss=0.1)
    mesh = create_mesh(mesh_shape=(4, 2), axis_names=("fsdp", "tensor"), devices=jax.devices())
    work = work.replace(strategy="fsdp+megatron")
    state, batch = work.init_on(mesh, jax.random.key(0)), work.example_batch()
    found = jit_eval_step(work, mesh)(state.params, {}, work.put_batch(mesh, batch))
    alone = work.replace(z_loss=0.0)
    _, expected = jax.jit(alone.train_step)(alone.init(jax.random.key(0)), batch)
    assert float(found.total / found.weight) == pytest.approx(float(expected["loss"]), abs=1e-5)
