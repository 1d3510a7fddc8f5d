"""Models of every kind train through the same workload and give the numbers they give alone."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from tpukit.errors import TPUModelError
from tpukit.parallel.mesh.mesh import create_mesh
from tpukit.step.workload import Workload

BATCH = {
    "x": jax.ShapeDtypeStruct((8, 16), jnp.float32),
    "y": jax.ShapeDtypeStruct((8, 4), jnp.float32),
}
RATE = 0.1


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 64, rngs=rngs)
        self.second = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, name="second")(jnp.tanh(linen.Dense(64, name="first")(x)))


def plain_init(rng):
    first, second = jax.random.split(rng)
    return {
        "first": {"kernel": jax.random.normal(first, (16, 64)) / 4, "bias": jnp.zeros(64)},
        "second": {"kernel": jax.random.normal(second, (64, 4)) / 8, "bias": jnp.zeros(4)},
    }


def plain_apply(params, batch):
    first, second = params["first"], params["second"]
    hidden = jnp.tanh(batch["x"] @ first["kernel"] + first["bias"])
    return hidden @ second["kernel"] + second["bias"]


def mean_square(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


MODELS = {
    "nnx": lambda: NnxModel(nnx.Rngs(0)),
    "nnx factory": lambda: NnxModel,
    "linen": LinenModel,
    "equinox": lambda: equinox.nn.MLP(16, 4, 64, 1, activation=jnp.tanh, key=jax.random.key(0)),
    "functions": lambda: (plain_init, plain_apply),
}


def make(kind, **options):
    settings = {"loss": mean_square, "optimizer": optax.sgd(RATE), "inputs": ("x",)}
    return Workload(MODELS[kind](), batch=BATCH, **{**settings, **options})


def by_hand(params, x, y):
    """The two-layer network and its gradient descent in float64."""
    kernels = sorted(
        (np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)),
        key=lambda leaf: (leaf.ndim, 64 not in leaf.shape, leaf.shape[0] == 64),
    )
    first_bias, second_bias = sorted((k for k in kernels if k.ndim == 1), key=len, reverse=True)
    (first,) = (k if k.shape[0] == 16 else k.T for k in kernels if 16 in k.shape)
    (second,) = (k if k.shape[1] == 4 else k.T for k in kernels if k.ndim == 2 and 4 in k.shape)
    hidden = np.tanh(x @ first + first_bias)
    wrong = 2 * (hidden @ second + second_bias - y) / y.size
    back = wrong @ second.T * (1 - hidden**2)
    loss = ((hidden @ second + second_bias - y) ** 2).mean()
    return loss, {
        (16, 64): first - RATE * x.T @ back,
        (64,): first_bias - RATE * back.sum(0),
        (64, 4): second - RATE * hidden.T @ wrong,
        (4,): second_bias - RATE * wrong.sum(0),
    }


@pytest.mark.parametrize("kind", MODELS)
def test_one_step_is_gradient_descent(kind):
    work = make(kind)
    state = work.init(jax.random.key(1))
    batch = work.example_batch()
    loss, expected = by_hand(state.params, *(np.asarray(batch[k], np.float64) for k in "xy"))
    state, metrics = jax.jit(work.train_step)(state, batch)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert int(state.step) == 1
    for leaf in jax.tree.leaves(state.params):
        right = expected.get(leaf.shape)
        right = expected[leaf.shape[::-1]].T if right is None else right
        np.testing.assert_allclose(leaf, right, atol=1e-6)


@pytest.mark.parametrize("kind", ["nnx factory", "equinox"])
def test_a_mesh_and_remat_change_nothing(kind):
    mesh = create_mesh(mesh_shape=(4, 2), axis_names=("fsdp", "model"))
    alone = make(kind)
    work = alone.replace(strategy="fsdp", remat=None if kind == "nnx factory" else "full")
    state = work.init_on(mesh, jax.random.key(1))
    kernels = [leaf for leaf in jax.tree.leaves(state.params) if leaf.size == 1024]
    assert all(not leaf.sharding.is_fully_replicated for leaf in kernels)
    batch = work.example_batch()
    state, _ = work.jit_train_step(mesh)(state, work.put_batch(mesh, batch))
    expected, _ = jax.jit(alone.train_step)(alone.init(jax.random.key(1)), batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, expected.params
    )


class WithStatistics(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False, momentum=0.5)(x)
        return linen.Dense(4)(linen.Dropout(0.5, deterministic=False)(x))


class WithDropout(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(x)))


@pytest.mark.parametrize("model", [WithStatistics(), WithDropout], ids=["linen", "nnx"])
def test_batch_statistics_are_carried_and_dropout_draws_anew(model):
    work = Workload(
        model, batch=BATCH, inputs=("x",), loss=mean_square, optimizer=optax.set_to_zero()
    )
    state = work.init(jax.random.key(0))
    step, batch = jax.jit(work.train_step), work.example_batch()
    state, first = step(state, batch)
    (mean,) = (
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.model_state)
        if "mean" in jax.tree_util.keystr(path)
    )
    np.testing.assert_allclose(mean, 0.5 * np.asarray(batch["x"]).mean(0), atol=1e-6)
    _, second = step(state, batch)
    assert first["loss"] != second["loss"], "the mask of dropout must differ from step to step"


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.norm(x))


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs), Block(rngs)])
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def test_batch_statistics_are_carried_through_checkpoints_too():
    states = []
    for remat in (None, "full"):
        work = Workload(Stack, batch=BATCH, inputs=("x",), loss=mean_square, remat=remat)
        state, _ = jax.jit(work.train_step)(work.init(jax.random.key(0)), work.example_batch())
        states.append(state.model_state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *states)
    assert any(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(states[1]))


@pytest.mark.parametrize("kind", ["linen", "equinox", "functions"])
def test_layers_are_segments(kind):
    """The network has two layers: two segments of one, or one of both."""
    for remat, segments in (("full", 2), ("full every=2", 1)):
        work = make(kind, remat=remat)
        execution = work.execution
        variables = jax.eval_shape(work.adapter.init, jax.random.key(0))
        traced = jax.make_jaxpr(
            lambda v, work=work, execution=execution: (
                work.adapter.apply(
                    v, work.example_batch(), rng=jax.random.key(0), execution=execution
                ).outputs
            )
        )(variables)
        assert str(traced).count("checkpoint[") + str(traced).count("remat2[") == segments


def test_linen_language_model_needs_no_loss():
    model = linen.Embed(32, 32)
    work = Workload(model, batch_size=2, sequence_length=4)
    state = work.init(jax.random.key(0))
    _, metrics = jax.jit(work.train_step)(state, work.example_batch())
    assert float(metrics["weight"]) == 8


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (3.0, "float is not a supported model; expected a preset name"),
        ("tinny", "there is no preset 'tinny'.*'tiny'"),
        ((plain_init, 3), "tuple is not a supported model"),
    ],
)
def test_what_is_no_model_is_refused(model, message):
    with pytest.raises(TPUModelError, match=message):
        Workload(model, batch=BATCH)


def test_a_factory_must_make_a_module():
    with pytest.raises(TPUModelError, match="returned dict, not a flax nnx module"):
        Workload(lambda rngs: {}, batch=BATCH).init(jax.random.key(0))


def test_a_missing_input_is_named():
    with pytest.raises(TPUModelError, match="the batch has x, y but the model reads 'inputs'"):
        Workload(LinenModel(), batch=BATCH).init(jax.random.key(0))
