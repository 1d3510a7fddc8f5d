"""Programs on stored parameters give what the same programs give on the decoded ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.kernels import quantize_weight
from tpukit.models import Execution, Variables, get_preset
from tpukit.models.adapters import adapt
from tpukit.models.generation import generate
from tpukit.models.stored import running
from tpukit.models.stored.calibration import find_matrices, path_text
from tpukit.models.stored.parameter import matrices_of, store, with_stacks
from tpukit.models.stored.parts import PartRuns, PartStack
from tpukit.models.stored.running import dense_parameters, with_stored_parameters

KEY = jax.random.key(0)


def stored(apply, params, *args, formats=("int8",), skip=()):
    """The parameters with the matrices of a program in these formats, in turn."""
    axes = {one.path: one.axes for one in find_matrices(apply, params, *args).found}

    def keep(path, leaf):
        name = path_text(path)
        if name not in axes or name in skip:
            return leaf
        parts = [
            quantize_weight(matrix, formats[number % len(formats)])
            for number, matrix in enumerate(matrices_of(leaf, axes[name]))
        ]
        return store(leaf, tuple(parts), axes[name])

    return jax.tree_util.tree_map_with_path(keep, params)


def layers(params, x):
    def layer(x, w):
        turned = jnp.einsum("bd,hed->bhe", x, w["turned"]).reshape(x.shape)
        return jnp.tanh(x @ w["plain"]) + turned, jnp.sum(x)

    x, sums = jax.lax.scan(layer, x @ params["first"], params["layers"])
    return jnp.einsum("bd,dhk->bhk", x, params["heads"]), sums


PARAMS = {
    "first": jax.random.normal(KEY, (8, 16)) / 4,
    "layers": {
        "plain": jax.random.normal(KEY, (4, 16, 16)) / 4,
        "turned": jax.random.normal(KEY, (4, 4, 4, 16)) / 4,
    },
    "heads": jax.random.normal(KEY, (16, 2, 5)) / 4,
}
X = jax.random.normal(KEY, (7, 8))


@pytest.mark.parametrize("formats", [("int8",), ("int8", "int8", "int4"), ("fp8", "int4")])
def test_formats_may_differ_from_layer_to_layer(formats):
    params = stored(layers, PARAMS, X, formats=formats)
    run = jax.jit(with_stored_parameters(layers))
    for found, expected in zip(run(params, X), layers(dense_parameters(params), X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("formats", "runs"),
    [(("int8",), [4]), (("int8", "int8", "int4"), [2, 1, 1]), (("int8", "int4"), [1, 1, 1, 1])],
)
def test_neighbours_that_are_alike_are_one_stack(formats, runs, monkeypatch):
    params = stored(layers, PARAMS, X, formats=formats)
    together = with_stacks(params)
    plain = together["layers"]["plain"]
    found = plain.parts.runs if isinstance(plain.parts, PartRuns) else [plain.parts]
    assert [len(run) for run in found] == runs
    assert all(isinstance(run, PartStack) for run in found)
    assert [part.format for part in plain.parts] == [(formats * 4)[at] for at in range(4)]
    assert plain.nbytes == params["layers"]["plain"].nbytes
    for kernels in (False, True):
        monkeypatch.setattr(running, "_has_kernels", lambda kernels=kernels: kernels)
        run = with_stored_parameters(layers)
        for found, expected in zip(run(together, X), run(params, X), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_loop_takes_layers_out_of_stacks_and_lays_none_side_by_side():
    together = with_stacks(stored(layers, PARAMS, X, formats=("int8", "int8", "int4")))
    traced = jax.make_jaxpr(with_stored_parameters(layers))(together, X)
    names = [eqn.primitive.name for eqn in traced.jaxpr.eqns]
    assert names.count("scan") == 3
    joined = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "concatenate"]
    codes = [eqn for eqn in joined if eqn.outvars[0].aval.dtype in (jnp.int8, jnp.int32)]
    assert not codes


def test_the_kernels_products_are_the_programs_own(monkeypatch):
    monkeypatch.setattr(running, "_has_kernels", lambda: True)
    params = stored(layers, PARAMS, X)
    found, expected = with_stored_parameters(layers)(params, X), layers(dense_parameters(params), X)
    # The kernel's stand-in on CPU multiplies in bfloat16.
    error = np.abs(np.asarray(found[0] - expected[0])).max() / np.abs(expected[0]).max()
    assert 0 < error < 0.02


def test_activations_in_int8_are_near_and_not_the_same():
    params = stored(layers, PARAMS, X)
    found = with_stored_parameters(layers, "int8")(params, X)[0]
    expected = layers(dense_parameters(params), X)[0]
    error = np.abs(np.asarray(found - expected)).max() / np.abs(expected).max()
    assert 0 < error < 0.05


def test_without_stored_parameters_it_is_the_function():
    assert np.array_equal(with_stored_parameters(layers)(PARAMS, X)[0], layers(PARAMS, X)[0])


def test_branches_and_open_loops():
    def apply(params, x):
        x = jax.lax.cond(x.sum() > 0, lambda: x @ params["w"], lambda: x @ params["w"].T)
        return jax.lax.while_loop(lambda x: (x**2).sum() > 1, lambda x: x @ params["w"] / 4, x)

    params = {"w": jax.random.normal(KEY, (8, 8)) / 3}
    kept = stored(lambda params, x: x @ params["w"], params, X)
    found = jax.jit(with_stored_parameters(apply))(kept, X)
    np.testing.assert_allclose(found, apply(dense_parameters(kept), X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scan", [True, False])
def test_the_reference_transformer_runs_and_generates(scan):
    config = get_preset("tiny")
    adapter = adapt(config, inputs=("inputs",), batch_shapes={})
    params = adapter.init(KEY).params
    tokens = jax.random.randint(KEY, (2, 16), 0, 256)

    def apply(params, batch):
        execution = Execution(scan_layers=scan)
        return adapter.apply(Variables(params, {}), batch, rng=KEY, execution=execution).outputs

    batch = {"inputs": tokens}
    kept = stored(apply, params, batch, formats=("int8", "int4"), skip=("lm_head/kernel",))
    dense = dense_parameters(kept)
    found = jax.jit(with_stored_parameters(apply))(kept, batch)
    np.testing.assert_allclose(found, apply(dense, batch), atol=1e-4)
    if scan:
        wanted = generate(config, dense, tokens, max_new_tokens=8, temperature=0).tokens
        assert generate(config, kept, tokens, max_new_tokens=8, temperature=0).tokens == wanted
