"""Moments in eight bits: what is kept, what is lost, and that learning does not notice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.compiler import compile_for
from tpukit.errors import ConfigError
from tpukit.hardware.formats import INT8, UINT8
from tpukit.hardware.stored_formats import MOMENT_FORMATS
from tpukit.models import get_preset
from tpukit.parallel import abstract_mesh, activation_rules
from tpukit.step import OptimizerSpec, build_optimizer, int8_adam
from tpukit.step.int8_adam import _thresholds, decode, encode, scale_by_int8_adam
from tpukit.step.optimizer_spec import state_bytes
from tpukit.step.workload import Workload
from tpukit.training import TPUCheckpointer

# One worker: the fixture that all of them share is dear.
pytestmark = pytest.mark.xdist_group("moments")

STEP = jnp.asarray(1)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from([(), (3,), (257,), (2, 3, 65)]),
    st.integers(0, 1000),
    st.sampled_from([INT8, UINT8]),
)
def test_codes_are_near_for_every_shape(shape, seed, format):
    values = np.random.default_rng(seed).normal(size=shape) * 10.0 ** (seed % 11 - 5)
    values = np.abs(values) if format is UINT8 else values
    codes, scales = encode(jnp.asarray(values), format, step=STEP)
    assert codes.shape == values.shape
    assert codes.dtype == format.name
    found = np.asarray(decode(codes, scales), np.float64)
    # Neighbouring fourth powers near share x of the largest differ by 4 x^(3/4) of a code.
    top = np.abs(values).max(initial=0)
    room = 4 * ((np.abs(values) / top) ** 0.25 + 1 / 127) ** 3 / 127 * top
    assert np.all(np.abs(found - values) <= room + 1e-6 * top)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 40))
def test_moments_take_the_bytes_that_their_formats_say(length, lines):
    state = jax.eval_shape(scale_by_int8_adam().init, jax.ShapeDtypeStruct((lines, length), "f4"))
    seen = [(state.mu, state.mu_scales), (state.nu, state.nu_scales)]
    for arrays, stored in zip(seen, MOMENT_FORMATS["int8"], strict=True):
        held = sum(one.size * one.dtype.itemsize for one in arrays)
        assert held == stored.nbytes(length, lines)


def test_small_second_moments_do_not_become_zero():
    values = jnp.asarray([1.0, 1e-6, 1e-12, 0.0])
    found = decode(*encode(values, UINT8, step=STEP))
    assert float(found[0]) == pytest.approx(1)
    assert np.all(np.asarray(found) > 0)
    assert float(found[2]) < 1e-8
    codes, _ = encode(values, UINT8, step=STEP)
    assert [int(codes[0]), int(codes[3])] == [255, 1]  # the largest, and the smallest there is
    signed, _ = encode(values, INT8, step=STEP)
    assert [int(signed[0]), int(signed[3])] == [127, 0]
    nothing = decode(*encode(jnp.zeros(5), UINT8, step=STEP))
    np.testing.assert_array_equal(nothing, np.zeros(5))


def test_rounding_is_exact_on_average():
    values = jnp.asarray(np.linspace(0.001, 1, 64), jnp.float32)

    def mean_of(steps):
        coded = jax.vmap(lambda step: decode(*encode(values, UINT8, step=step)))
        return np.asarray(coded(jnp.arange(steps)).mean(0))

    alone = np.abs(mean_of(1) / values - 1).max()
    assert alone > 0.01
    assert np.abs(mean_of(256) / values - 1).max() < alone / 20


def test_an_average_follows_its_gradient_down():
    """By nearest rounding a slow average stays where it is: here it must decay as in float32."""
    narrow, wide = scale_by_int8_adam(0.9, 0.999), optax.scale_by_adam(0.9, 0.999)
    params = {"w": jnp.zeros((4, 64))}
    states = narrow.init(params), wide.init(params)
    rng = np.random.default_rng(0)
    update = jax.jit(lambda gradient, states: (
        narrow.update(gradient, states[0])[1], wide.update(gradient, states[1])[1]
    ))  # fmt: skip
    for step in range(400):
        size = 1.0 if step < 20 else 0.01
        states = update({"w": jnp.asarray(rng.normal(size=(4, 64)) * size)}, states)
    found = np.asarray(decode(states[0].nu["w"], states[0].nu_scales["w"]))
    truth = np.asarray(states[1].nu["w"])
    assert np.median(np.abs(found / truth - 1)) < 0.05


def alike(found, expected):
    """Equal but for a few numbers so near a threshold that fusing decides their rounding."""
    same = np.isclose(np.asarray(found, np.float32), expected, rtol=1e-5, atol=1e-6)
    return same.mean() > 0.999


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stack_is_updated_like_its_layers(stages):
    """Layer by layer, and on every pipeline stage its own: as if each were a matrix alone."""
    optimizer = scale_by_int8_adam()
    rng = np.random.default_rng(1)
    gradients = [jnp.asarray(rng.normal(size=(4, 6, 300)), jnp.float32) for _ in range(3)]
    whole = optimizer.init({"w": gradients[0]})
    alone = [optimizer.init({"w": gradients[0][layer]}) for layer in range(4)]
    mesh = abstract_mesh(mesh_shape=(stages,), axis_names=("stage",))
    for gradient in gradients:
        with activation_rules(mesh, "pipeline"):
            update, whole = jax.jit(optimizer.update)({"w": gradient}, whole)
        each = [optimizer.update({"w": gradient[i]}, state) for i, state in enumerate(alone)]
        alone = [state for _, state in each]
        expected = np.stack([updates["w"] for updates, _ in each])
        assert alike(update["w"], expected)
    for name in ("mu", "nu", "mu_scales", "nu_scales"):
        expected = np.stack([getattr(state, name)["w"] for state in alone])
        assert alike(getattr(whole, name)["w"], expected)


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_a_compiled_step_holds_as_much_less_as_the_state_does():
    config = get_preset("llama3.2-1b", n_layers=8, vocab_size=8192)
    totals, states = {}, {}
    for dtype in ("float32", "int8"):
        optimizer = build_optimizer(OptimizerSpec(moment_dtype=dtype), 1e-3)
        work = Workload(config, batch_size=1, sequence_length=512, optimizer=optimizer)
        compiled = compile_for(work, "v6e-1", mesh={"fsdp": 1}, until="memory")
        totals[dtype] = compiled.memory.total_bytes
        purposes = compiled.memory.purposes
        states[dtype] = purposes["optimizer state"] + purposes["padding"]  # of scales, mostly
    shapes = config.parameter_shapes().values()
    kept = {
        dtype: sum(state_bytes(OptimizerSpec(moment_dtype=dtype), shape) for shape in shapes)
        for dtype in totals
    }
    assert states == pytest.approx(kept, rel=1e-4)
    saved = kept["float32"] - kept["int8"]
    assert totals["float32"] - totals["int8"] == pytest.approx(saved, rel=0.1)


@pytest.fixture(scope="module")
def runs(compile_quickly):
    """Losses and the last state of the same run with moments in float32 and in int8."""
    found = {}
    text = np.frombuffer((b"the quick brown fox jumps over the lazy dog; " * 200), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - 33, size=(40, 8))
    windows = text[starts[..., None] + np.arange(33)].astype(np.int32)
    for dtype in ("float32", "int8"):
        optimizer = build_optimizer(OptimizerSpec(moment_dtype=dtype, weight_decay=0.01), 3e-3)
        work = Workload("tiny", batch_size=8, sequence_length=32, optimizer=optimizer)
        state = jax.jit(work.init)(jax.random.key(0))
        step = jax.jit(work.train_step)
        losses = []
        for window in windows:
            batch = {"inputs": window[:, :-1], "targets": window[:, 1:]}
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        found[dtype] = (np.asarray(losses), state, work)
    return found


def test_learning_does_not_notice(runs):
    wide, narrow = runs["float32"][0], runs["int8"][0]
    assert wide[-1] < 0.6 * wide[0]
    smooth = [np.convolve(losses, np.ones(10) / 10, "valid") for losses in (wide, narrow)]
    np.testing.assert_allclose(smooth[1], smooth[0], rtol=0.02)


def test_the_state_is_a_quarter(runs):
    sizes = {
        dtype: sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
        for dtype, (_, state, _) in runs.items()
    }
    # Rows of 64 here: a scale for each costs more than for the 256 of larger models.
    assert sizes["int8"] < 0.32 * sizes["float32"]


def test_the_state_survives_a_checkpoint(runs, tmp_path):
    state = runs["int8"][1]
    with TPUCheckpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, params=state.params, opt_state=state.opt_state)
        found = checkpointer.restore(like={"opt_state": state.opt_state})
    for before, after in zip(
        jax.tree.leaves(state.opt_state), jax.tree.leaves(found.opt_state), strict=True
    ):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)


def test_moments_lie_where_their_parameters_do(runs):
    work = runs["int8"][2]
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    places = work.shardings(mesh).state
    adam = next(
        leaf
        for leaf in jax.tree.leaves(places.opt_state, is_leaf=lambda node: hasattr(node, "mu"))
        if hasattr(leaf, "mu")
    )
    assert adam.mu == places.params
    assert adam.nu == places.params


def test_other_optimizers_refuse():
    with pytest.raises(ConfigError, match="'int8' works with adamw, but the optimizer is lion"):
        OptimizerSpec(name="lion", moment_dtype="int8")


def test_thresholds_are_fractions_of_two_irrational_steps():
    """They are part of the format of a checkpoint: a run goes on as if it had not stopped."""
    golden, root = 0.6180339887, 0.4142135624  # fractions of the golden ratio and of the root of 2

    def at(step):
        return np.asarray(_thresholds((1, 4), jnp.asarray(step)))

    columns = [0, root, 2 * root, 3 * root % 1]
    np.testing.assert_allclose(at(0), columns, atol=1e-6)
    np.testing.assert_allclose(at(1), [(golden + one) % 1 for one in columns], atol=1e-6)
    np.testing.assert_allclose(at(4095)[0], 4095 * golden % 1, atol=1e-3)  # of float32
    np.testing.assert_array_equal(at(4096), at(0))


@pytest.mark.parametrize("count", [34, 89, 233])
def test_the_thresholds_of_an_element_are_spread_as_evenly_as_can_be(count):
    """After a Fibonacci number of steps no gap is much longer than the shortest."""
    found = np.sort(jax.vmap(lambda step: _thresholds((1, 1), step))(jnp.arange(count))[:, 0])
    gaps = np.diff([*found, found[0] + 1])
    assert gaps.max() / gaps.min() == pytest.approx(1.618, abs=0.03)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(("shape", "is_stack"), [((4, 6, 300), True), ((6, 300), False)])
def test_only_stacks_are_updated_in_a_loop_and_not_on_a_gpu(monkeypatch, shape, is_stack, on_gpu):
    monkeypatch.setattr(int8_adam, "on_one_gpu", lambda: on_gpu)
    optimizer, gradient = scale_by_int8_adam(), jnp.ones(shape)
    program = jax.make_jaxpr(optimizer.update)(gradient, optimizer.init(gradient))
    loops = {"while", "scan"} & {equation.primitive.name for equation in program.eqns}
    assert bool(loops) == (is_stack and not on_gpu)
