"""Matrices found in any model, and XᵀX of their inputs against float64 numpy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from tpukit.models import Execution, Variables, get_preset
from tpukit.models.adapters import adapt
from tpukit.models.stored.calibration import collect_statistics, find_matrices

KEY = jax.random.key(0)


def weights(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape) / shape[0] ** 0.5


def close(found, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(found, np.float64) / scale, expected / scale, atol=2e-6)


def test_plain_functions_with_a_loop_over_layers():
    params = {"first": weights(8, 16), "stack": weights(3, 16, 16)}

    def apply(params, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, x @ params["first"], params["stack"])[0]

    batches = [np.asarray(weights(5, 8)), np.asarray(weights(7, 8, seed=1))]
    matrices = find_matrices(apply, params, batches[0])
    names = [one.name for one in matrices.found]
    assert names == ["first", "stack[0]", "stack[1]", "stack[2]"]
    found = collect_statistics(apply, params, batches, matrices)
    first = np.asarray(params["first"], np.float64)
    x = [np.asarray(batch, np.float64) for batch in batches]
    close(found["first"].gram, sum(one.T @ one for one in x))
    x = [one @ first for one in x]
    for number, w in enumerate(np.asarray(params["stack"], np.float64)):
        close(found[f"stack[{number}]"].gram, sum(one.T @ one for one in x))
        assert found[f"stack[{number}]"].rows == 12
        x = [np.tanh(one @ w) for one in x]


def test_transposed_reshaped_and_many_headed_weights():
    params = {"q": weights(6, 2, 4), "o": weights(2, 4, 6), "t": weights(3, 6)}

    def apply(params, x):
        heads = jnp.einsum("bd,dhk->bhk", x, params["q"])
        back = jnp.einsum("bhk,hkd->bd", heads, params["o"])
        return back @ params["t"].T

    x = np.asarray(weights(5, 6))
    matrices = find_matrices(apply, params, x)
    assert {one.name: one.shape for one in matrices.found} == {
        "q": (6, 8),
        "o": (8, 6),
        "t": (6, 3),
    }
    found = collect_statistics(apply, params, [x], matrices)
    heads = x.astype(np.float64) @ np.asarray(params["q"], np.float64).reshape(6, 8)
    close(found["o"].gram, heads.T @ heads)


def test_experts_in_one_product_have_each_their_own():
    params = {"experts": weights(4, 6, 5)}

    def apply(params, x):
        return jnp.einsum("ecd,edf->ecf", x, params["experts"])

    x = np.asarray(weights(4, 9, 6))
    matrices = find_matrices(apply, params, x)
    found = collect_statistics(apply, params, [x], matrices)
    wide = x.astype(np.float64)
    for expert in range(4):
        close(found[f"experts[{expert}]"].gram, wide[expert].T @ wide[expert])


def test_a_piece_and_both_sides_are_refused_with_a_reason():
    params = {"piece": weights(4, 8), "tied": weights(4, 4)}

    def apply(params, x):
        return (x @ params["piece"][:, :4]) @ params["tied"] @ params["tied"].T

    refused = find_matrices(apply, params, weights(2, 4)).refused
    assert "uses a part" in refused["piece"]
    assert "both sides" in refused["tied"]


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.second = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Dense(16)(x))
        return linen.Dense(4)(x)


def test_every_framework_by_the_same_walk():
    x = np.asarray(weights(5, 8))
    shapes = {"inputs": jax.ShapeDtypeStruct(x.shape, jnp.float32)}
    models = {
        "nnx": (NnxModel(nnx.Rngs(0)), ["first/kernel", "second/kernel"]),
        "linen": (LinenModel(), ["Dense_0/kernel", "Dense_1/kernel"]),
        "equinox": (
            eqx.nn.MLP(8, 4, 16, 1, key=KEY),
            ["layers/0/weight", "layers/1/weight"],
        ),
    }
    for name, (model, expected) in models.items():
        adapter = adapt(model, inputs=("inputs",), batch_shapes=shapes)
        variables = adapter.init(KEY)

        def apply(params, batch, adapter=adapter, state=variables.model_state):
            return adapter.apply(
                Variables(params, state), batch, rng=KEY, execution=Execution()
            ).outputs

        matrices = find_matrices(apply, variables.params, {"inputs": x})
        assert [one.name for one in matrices.found] == expected, name
        assert [one.shape for one in matrices.found] == [(8, 16), (16, 4)], name
        found = collect_statistics(apply, variables.params, [{"inputs": x}], matrices)
        close(found[expected[0]].gram, x.astype(np.float64).T @ x.astype(np.float64))


@pytest.mark.parametrize("scan", [True, False])
def test_the_reference_transformer_scanned_or_not(scan):
    config = get_preset("tiny")
    adapter = adapt(config, inputs=("inputs",), batch_shapes={})
    params = adapter.init(KEY).params
    tokens = jax.random.randint(KEY, (2, 16), 0, 256)

    def apply(params, batch):
        execution = Execution(scan_layers=scan)
        return adapter.apply(Variables(params, {}), batch, rng=KEY, execution=execution).outputs

    matrices = find_matrices(apply, params, {"inputs": tokens})
    assert len(matrices.found) == 7 * config.n_layers + 1
    assert matrices.found[-1].path == "lm_head/kernel"
    found = collect_statistics(
        apply, params, [{"inputs": tokens}], matrices, only=["lm_head/kernel"]
    )
    x, _ = adapter.module(params, Execution()).hidden(tokens)
    normed = np.asarray(adapter.module(params, Execution()).final_norm(x), np.float64)
    rows = normed.reshape(-1, normed.shape[-1])
    close(found["lm_head/kernel"].gram, rows.T @ rows)
