"""Schedules equal optax's, masks spare what must not decay, moments take the format asked for."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import ConfigError
from tpukit.step import LearningRate, OptimizerSpec, build_optimizer
from tpukit.step.int8_adam import scale_by_int8_adam
from tpukit.step.optimizer import decay_mask
from tpukit.step.optimizer_spec import DEFAULT_LEARNING_RATE, OPTIMIZERS
from tpukit.step.workload import Workload


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_schedules_equal_those_of_optax(schedule):
    rate = LearningRate(
        peak=0.3, schedule=schedule, total_steps=100, warmup_steps=10, final_fraction=0.1
    )
    after = {
        "cosine": (10, optax.cosine_decay_schedule(0.3, 90, alpha=0.1)),
        "linear": (10, optax.linear_schedule(0.3, 0.03, 90)),
        "constant": (10, optax.constant_schedule(0.3)),
        "wsd": (80, optax.linear_schedule(0.3, 0.03, 20)),
    }
    start, truth = after[schedule]
    for step in range(10):
        assert rate(step) == pytest.approx(0.3 * (step + 1) / 10)
    for step in range(10, start):
        assert rate(step) == pytest.approx(0.3)
    for step in range(start, 110):
        assert rate(step) == pytest.approx(float(truth(step - start)), rel=1e-5)


@settings(deadline=None)  # the first example compiles
@given(
    st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    st.integers(1, 500),
    st.integers(0, 500),
    st.integers(0, 600),
)
def test_the_host_and_the_device_agree(schedule, total, warmup, step):
    rate = LearningRate(
        peak=1.0, schedule=schedule, total_steps=total, warmup_steps=min(warmup, total)
    )
    host = float(rate(step))
    assert 0 < host <= 1
    assert float(rate(jnp.asarray(step))) == pytest.approx(host, rel=1e-5)


def test_what_does_not_decay():
    params = Workload("tiny", batch_size=1, sequence_length=8).state_shapes().params
    flat = jax.tree_util.tree_flatten_with_path(decay_mask()(params))[0]
    decayed = {jax.tree_util.keystr(path) for path, yes in flat if yes}
    assert decayed == {
        jax.tree_util.keystr(path) for path, _ in flat if "kernel" in jax.tree_util.keystr(path)
    }
    own = {"weight": jnp.ones((2, 2)), "gain": jnp.ones(2)}
    assert decay_mask()(own) == {"weight": True, "gain": False}
    assert decay_mask(("weight",))(own) == {"weight": False, "gain": False}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_downhill_and_decays(name):
    spec = OptimizerSpec(name=name, weight_decay=0.5, moment_dtype="float32")
    optimizer = build_optimizer(spec, 0.1)
    params = {"w": jnp.full((4, 4), 2.0), "norm": jnp.full((4, 4), 2.0)}
    state = optimizer.init(params)
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(still, state, params)
    assert np.allclose(updates["w"], -0.1 * 0.5 * 2.0)
    assert np.allclose(updates["norm"], 0.0)
    state = optimizer.init(params)
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert (updates["norm"] < 0).all()


def test_adamw_is_optax_adamw_after_clipping():
    params = {"w": jnp.ones((3, 3))}
    gradients = {"w": jnp.arange(9.0).reshape(3, 3)}
    spec = OptimizerSpec(weight_decay=0.1, clip_norm=1.0)
    ours = build_optimizer(spec, 0.01)
    truth = optax.adamw(0.01, b1=0.9, b2=0.95, weight_decay=0.1)
    clipped = {"w": gradients["w"] / jnp.linalg.norm(gradients["w"])}
    found, _ = ours.update(gradients, ours.init(params), params)
    expected, _ = truth.update(clipped, truth.init(params), params)
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-5)


@pytest.mark.parametrize("size", [0.3, 5.0])
def test_clipping_scales_all_gradients_by_their_norm_together(size):
    """Momentum keeps the size of a gradient, which Adam would take out again."""
    gradients = {"w": jnp.array([[3.0, 0.0], [0.0, 0.4]]) * size, "v": jnp.array([4.0, 0.3]) * size}
    params = jax.tree.map(jnp.zeros_like, gradients)
    spec = OptimizerSpec(name="sgd", weight_decay=0.0, clip_norm=2.0, moment_dtype="float32")
    optimizer = build_optimizer(spec, 1.0)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in gradients.values()))
    for name, gradient in gradients.items():
        np.testing.assert_allclose(updates[name], -gradient * min(1.0, 2.0 / norm), rtol=1e-6)


def test_a_bad_gradient_changes_nothing():
    params = {"w": jnp.ones((3, 3)), "v": jnp.ones(2)}
    plain = build_optimizer(OptimizerSpec(), 0.1)
    skipping = build_optimizer(OptimizerSpec(skip_nonfinite=True), 0.1)
    state = skipping.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(plain.init(params))
    good = {"w": jnp.full((3, 3), 0.5), "v": jnp.ones(2)}
    for found, expected in zip(
        jax.tree.leaves(skipping.update(good, state, params)),
        jax.tree.leaves(plain.update(good, state, params)),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)  # compiled, and not
    for bad in (jnp.nan, jnp.inf):
        updates, after = skipping.update({**good, "v": jnp.array([1.0, bad])}, state, params)
        assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
        assert all(map(np.array_equal, jax.tree.leaves(after), jax.tree.leaves(state)))


@pytest.mark.parametrize("shape", [(), (7,), (3, 300), (2, 4, 256)])
def test_adam_in_eight_bits_is_optax_adam_to_a_few_per_cent(shape):
    """Blocks of 256 numbers that do not come out even, stacks of layers, and a lone number."""
    ours, truth = scale_by_int8_adam(0.8, 0.9, 1e-6), optax.scale_by_adam(0.8, 0.9, 1e-6)
    params = jnp.zeros(shape)
    states = [ours.init(params), truth.init(params)]
    for step in range(6):
        keys = jax.random.split(jax.random.key(step))
        sizes = jax.random.uniform(keys[0], shape, minval=0.7, maxval=1.4) * (1 + step)
        gradient = jnp.where(jax.random.bernoulli(keys[1], 0.8, shape), sizes, -0.5 * sizes)
        found, states[0] = ours.update(gradient, states[0])
        expected, states[1] = truth.update(gradient, states[1])
        # Codes of the fourth power are 3 % apart at most; errors of several steps add up.
        np.testing.assert_allclose(found, expected, atol=0.05)
        assert abs(float((found - expected).mean())) < (0.05 if expected.size < 100 else 0.004)
    assert int(states[0].steps) == 6


def test_moments_in_bfloat16():
    optimizer = build_optimizer(OptimizerSpec(moment_dtype="bfloat16"), 0.1)
    state = optimizer.init({"w": jnp.ones((2, 2))})
    formats = {leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim}
    assert formats == {"bfloat16", "float32"}  # first and second moment


def test_refusals():
    with pytest.raises(ConfigError, match=r"'adamv' is unknown.*Did you mean 'adamw'"):
        OptimizerSpec(name="adamv")
    with pytest.raises(ConfigError, match="adafactor has none"):
        OptimizerSpec(name="adafactor", moment_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"'cosin' is unknown.*'cosine'"):
        LearningRate(peak=1.0, schedule="cosin", total_steps=10)
    with pytest.raises(ConfigError, match="warmup_steps=20 is longer than the 10 steps"):
        LearningRate(peak=1.0, total_steps=10, warmup_steps=20)


@pytest.mark.parametrize(
    ("spec", "truth"),
    [
        (
            OptimizerSpec(name="lion", beta1=0.8, beta2=0.9, weight_decay=0.0, clip_norm=None),
            optax.lion(0.01, b1=0.8, b2=0.9, weight_decay=0.0),
        ),
        (
            OptimizerSpec(name="sgd", beta1=0.8, weight_decay=0.0, clip_norm=None),
            optax.sgd(0.01, momentum=0.8),
        ),
        (
            OptimizerSpec(name="adafactor", weight_decay=0.0, clip_norm=None),
            optax.adafactor(0.01, multiply_by_parameter_scale=False),
        ),
        (
            OptimizerSpec(beta1=0.7, beta2=0.8, eps=0.1, weight_decay=0.0, clip_norm=None),
            optax.adam(0.01, b1=0.7, b2=0.8, eps=0.1),
        ),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_each_optimizer_is_that_of_optax(spec, truth):
    """Gradients grow, so that Adafactor clips its updates; rows of 128 are what it factors."""
    ours = build_optimizer(spec, 0.01)
    params = {"w": jnp.full((128, 130), 0.3), "v": jnp.full((4, 127, 3), 0.3)}
    states = [ours.init(params), truth.init(params)]
    for step in range(4):
        keys = jax.random.split(jax.random.key(step), 2)
        gradients = {
            name: 10.0**step * jax.random.normal(key, params[name].shape)
            for name, key in zip(params, keys, strict=True)
        }
        found, states[0] = ours.update(gradients, states[0], params)
        expected, states[1] = truth.update(gradients, states[1], params)
        for name in params:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_settings_reach_adam_whatever_its_moments(dtype):
    """The first update, before any moment was rounded: gradient / (|gradient| + eps)."""
    spec = OptimizerSpec(eps=0.5, weight_decay=0.2, clip_norm=None, moment_dtype=dtype)
    optimizer = build_optimizer(spec, 0.1)
    params = {"w": jnp.full((2, 2), 3.0)}
    updates, _ = optimizer.update({"w": jnp.full((2, 2), 1.5)}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1 * (1.5 / (1.5 + 0.5) + 0.2 * 3.0), rtol=1e-5)


def test_usual_settings_are_those_of_llama_and_of_optax():
    usual = OptimizerSpec()  # LLaMA (arXiv 2302.13971), section 2.3
    assert (usual.beta1, usual.beta2, usual.weight_decay, usual.clip_norm) == (0.9, 0.95, 0.1, 1.0)
    assert LearningRate(peak=1.0, total_steps=10).final_fraction == 0.1
    assert usual.eps == inspect.signature(optax.adamw).parameters["eps"].default
    assert not usual.skip_nonfinite
    ours, theirs = (
        {name: one.default for name, one in inspect.signature(made).parameters.items()}
        for made in (scale_by_int8_adam, optax.scale_by_adam)
    )
    assert ours == {name: theirs[name] for name in ours}
    assert DEFAULT_LEARNING_RATE == 3e-4  # the largest of the same paper, of its 6.7B and 13B


def test_a_schedule_has_no_warm_up_and_a_fifth_of_decay_unless_asked():
    rate = LearningRate(peak=1.0, schedule="wsd", total_steps=50)
    assert [float(rate(step)) for step in (0, 39, 40)] == [1.0, 1.0, 1.0]
    assert float(rate(41)) == pytest.approx(1 - 0.9 / 10)
    assert float(rate(50)) == pytest.approx(0.1)
    one = LearningRate(peak=2.0, schedule="linear", total_steps=1, warmup_steps=1)
    assert [float(one(step)) for step in (0, 1, 2)] == pytest.approx([2.0, 2.0, 0.2])
