"""Pipelines give the loss and gradients of the model they were cut from, in less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpukit.errors import MeshError, ShardingError, TPUValidationError
from tpukit.parallel.pipelining.forward import (
    PipelineParams,
    join_microbatches,
    join_stages,
    pipeline,
    split_microbatches,
    split_stages,
)
from tpukit.parallel.pipelining.gradient import pipeline_value_and_grad
from tpukit.parallel.ring.attention import ring_attention

VOCAB, D, LAYERS, BATCH, LENGTH, MICRO = 11, 8, 4, 12, 4, 3
AXES = ("stage", "data", "model")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), AXES)


@pytest.fixture(scope="module")
def params():
    random = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return jnp.asarray(random.normal(size=shape) * scale, jnp.float32)

    layers = {
        "up": normal(LAYERS, D, 2 * D, scale=0.3),
        "down": normal(LAYERS, 2 * D, D, scale=0.3),
    }
    return PipelineParams(normal(VOCAB, D), layers, normal(D, VOCAB))


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, BATCH, LENGTH)))


def embed(embedding, ids):
    return {"hidden": embedding[ids], "ids": ids, "penalty": jnp.zeros(())}


def run_layers(layers, x):
    def layer(x, weights):
        hidden = x["hidden"] + jnp.tanh(x["hidden"] @ weights["up"]) @ weights["down"]
        return {**x, "hidden": hidden, "penalty": x["penalty"] + (hidden**2).mean()}, None

    return jax.lax.scan(layer, x, layers)[0]


def head_loss(head, y, targets):
    log_p = jax.nn.log_softmax(y["hidden"] @ head)
    loss = -jnp.take_along_axis(log_p, targets[..., None], axis=-1).mean()
    # The ids rode through every stage beside the activations, untouched.
    return loss + 0.01 * y["penalty"], {"id_sum": y["ids"].sum(), "tokens": targets.size}


@pytest.fixture(scope="module")
def uncut(params, tokens):
    def loss(params):
        return head_loss(params.last, run_layers(params.stages, embed(params.first, tokens[0])),
                         tokens[1])[0]  # fmt: skip

    return jax.jit(jax.value_and_grad(loss))(params)


def assert_trees_close(ours, theirs, atol=1e-5):
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_loss_and_gradients_equal_the_uncut_model(params, tokens, uncut, mesh, schedule):
    # Stages sharded over the model axis and micro-batches over data: both stay automatic.
    cut = params._replace(
        stages={
            "up": jax.device_put(
                split_stages(params.stages["up"], 2),
                NamedSharding(mesh, P("stage", None, None, "model")),
            ),
            "down": jax.device_put(
                split_stages(params.stages["down"], 2),
                NamedSharding(mesh, P("stage", None, "model")),
            ),
        }
    )
    ids, targets = jax.device_put(
        split_microbatches((tokens[0], tokens[1]), MICRO), NamedSharding(mesh, P(None, "data"))
    )

    @jax.jit
    def step(params, ids, targets):
        return pipeline_value_and_grad(
            run_layers, head_loss, params, ids, targets,
            mesh=mesh, schedule=schedule, first_fn=embed, has_aux=True,
        )  # fmt: skip

    (loss, aux), grads = step(cut, ids, targets)
    assert_trees_close(loss, uncut[0])
    assert_trees_close(grads._replace(stages=join_stages(grads.stages)), uncut[1])
    assert int(aux["id_sum"]) == int(tokens[0].sum())
    assert int(aux["tokens"]) == BATCH * LENGTH


def test_four_stages_of_bfloat16_and_one_microbatch(mesh):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "data"))
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(4, D, D)) * 0.3, jnp.bfloat16)
    x = jnp.ones((1, 4, D), jnp.bfloat16)

    def stage(weight, x):
        return jnp.tanh(x @ weight)

    def loss(_, y, target):
        return ((y - target).astype(jnp.float32) ** 2).mean()

    step = functools.partial(
        pipeline_value_and_grad, stage, loss, PipelineParams((), weights, ()), x, x, mesh=mesh
    )
    (one, grads_one), (all_, grads_all) = jax.jit(
        lambda: (step(schedule="1f1b"), step(schedule="gpipe"))
    )()
    np.testing.assert_allclose(one, all_, rtol=1e-2)
    assert grads_one.stages.dtype == jnp.bfloat16
    assert_trees_close(
        grads_one.stages.astype(jnp.float32), grads_all.stages.astype(jnp.float32), atol=2e-2
    )


def test_pipeline_runs_every_stage_on_every_microbatch(mesh):
    x = jnp.arange(24.0).reshape(6, 2, 2)
    y = jax.jit(lambda x: pipeline(lambda a, x: 2 * x + a, jnp.asarray([1.0, 5.0]), x, mesh=mesh))(
        x
    )
    np.testing.assert_array_equal(y, 2 * (2 * x + 1) + 5)


def temp_bytes(schedule, microbatches, mesh):
    weights = jax.ShapeDtypeStruct((2, 64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((microbatches, 32, 64), jnp.float32)
    step = jax.jit(
        lambda weights, x: pipeline_value_and_grad(
            lambda w, x: jnp.tanh(x @ w), lambda _, y, t: ((y - t) ** 2).mean(),
            PipelineParams((), weights, ()), x, x, mesh=mesh, schedule=schedule,
        )
    )  # fmt: skip
    return step.lower(weights, x).compile().memory_analysis().temp_size_in_bytes


def test_1f1b_memory_does_not_grow_with_microbatches():
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    one_input = 32 * 64 * 4
    growth = {
        name: temp_bytes(name, 24, mesh) - temp_bytes(name, 8, mesh) for name in ("gpipe", "1f1b")
    }
    assert growth["gpipe"] >= 16 * one_input  # every further micro-batch is kept
    assert growth["1f1b"] < one_input


def test_a_stage_may_hold_a_ring_attention():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "context"))
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(2, D, D)) * 0.3, jnp.float32)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 1, 8, D)), jnp.float32)

    def stage(weight, x, *, mesh=mesh):
        heads = (x @ weight).reshape(*x.shape[:2], 2, -1)
        return x + ring_attention(heads, heads, heads, mesh=mesh).reshape(x.shape)

    def loss(_, y, target):
        return (y**2).mean()

    def uncut(weights):
        return loss(None, stage(weights[1], stage(weights[0], x[:, 0], mesh=None), mesh=None), None)

    value, grads = jax.jit(
        lambda weights: pipeline_value_and_grad(
            stage, loss, PipelineParams((), weights, ()), x, x, mesh=mesh, schedule="1f1b"
        )
    )(weights)
    expected, expected_grads = jax.jit(jax.value_and_grad(uncut))(weights)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grads.stages, expected_grads, atol=1e-5)


@pytest.mark.parametrize(("schedule", "permutes"), [("gpipe", 2), ("1f1b", 4)])
def test_lowers_for_tpu_without_devices(schedule, permutes):
    mesh = AbstractMesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    weights, x = jnp.ones((2, D, D)), jnp.ones((4, 2, D))
    step = jax.jit(
        lambda weights, x: pipeline_value_and_grad(
            lambda w, x: x @ w, lambda _, y, t: (y * t).mean(),
            PipelineParams((), weights, ()), x, x, mesh=mesh, schedule=schedule,
        )
    )  # fmt: skip
    text = step.trace(weights, x).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.collective_permute") == permutes


@given(rows=st.integers(1, 6), microbatches=st.integers(1, 5), stages=st.integers(1, 4))
def test_splitting_and_joining_undo_each_other(rows, microbatches, stages):
    batch = np.arange(rows * microbatches * 2).reshape(-1, 2)
    pieces = split_microbatches(batch, microbatches)
    assert pieces.shape == (microbatches, rows, 2)
    np.testing.assert_array_equal(pieces[0], batch[::microbatches])
    np.testing.assert_array_equal(join_microbatches(pieces), batch)
    layers = np.arange(rows * stages)
    np.testing.assert_array_equal(split_stages(layers, stages), layers.reshape(stages, rows))
    np.testing.assert_array_equal(join_stages(split_stages(batch, microbatches)), batch)


def test_errors_name_the_fix(mesh):
    x = jnp.ones((4, 2, D))
    run = functools.partial(pipeline, lambda w, x: x @ w, jnp.ones((2, D, D)))
    with pytest.raises(
        ShardingError, match=r"12 layers .* 5 pipeline stages; .* 1, 2, 3, 4, 6, 12"
    ):
        split_stages(jnp.ones((12, 2)), 5)
    with pytest.raises(ShardingError, match=r"batch of 10 .* 4 micro-batches; .*: 1, 2, 5, 10"):
        split_microbatches(jnp.ones((10, 2)), 4)
    with pytest.raises(ShardingError, match=r"is \(8, 8, 8\) and 'stage'=2: .* split_stages"):
        pipeline(lambda w, x: x, jnp.ones((8, D, D)), x, mesh=mesh)
    with pytest.raises(MeshError, match=r"axis 'stages', but the mesh .* Did you mean 'stage'"):
        run(x, mesh=mesh, axis="stages")
    with pytest.raises(MeshError, match=r"needs a mesh with the axis 'stage'"):
        run(x)
    with pytest.raises(ShardingError, match=r"have \[3, 4\] micro-batches"):
        run({"a": x, "b": x[:3]}, mesh=mesh)
    with pytest.raises(ShardingError, match=r"takes float32\[2, 8\] but returns float32\[2, 1\]"):
        pipeline(lambda w, x: x[:, :1], jnp.ones((2, D, D)), x, mesh=mesh)
    with pytest.raises(TPUValidationError, match=r"'gpip' is unknown.*Did you mean 'gpipe'"):
        pipeline_value_and_grad(
            lambda w, x: x, lambda *_: 0.0, PipelineParams((), jnp.ones((2, 1)), ()), x, x,
            mesh=mesh, schedule="gpip",
        )  # fmt: skip
