"""The gated activation and its gradient against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.kernels.gated_activation import gated_activation, gpu, reference


@pytest.mark.parametrize("width", [256, 768])
@pytest.mark.parametrize("passes", [reference, gpu], ids=["reference", "triton"])
def test_gradients_against_float64(passes, width):
    both = 3 * jax.random.normal(jax.random.key(0), (3, 5, 2 * width))
    d = jax.random.normal(jax.random.key(1), (3, 5, width))
    options = {"interpret": True} if passes is gpu else {}
    (d_both,) = passes.backward(both, d, **options)
    (g, v), c = np.split(np.asarray(both, np.float64), 2, axis=-1), np.asarray(d, np.float64)
    share = 1 / (1 + np.exp(-g))
    wanted = np.concatenate([c * v * (share + g * share * (1 - share)), c * g * share], axis=-1)
    np.testing.assert_allclose(d_both, wanted, rtol=1e-5, atol=1e-5)


def test_the_public_function_has_jax_own_gradient():
    both = jax.random.normal(jax.random.key(1), (2, 16, 48))

    def plain(both):
        gate, value = jnp.split(both, 2, axis=-1)
        return jnp.sum((jax.nn.silu(gate) * value) ** 2)

    ours = jax.grad(lambda both: jnp.sum(gated_activation(both) ** 2))(both)
    np.testing.assert_allclose(ours, jax.grad(plain)(both), rtol=1e-5, atol=1e-5)


def test_narrow_rows_are_left_to_xla():
    assert gpu.fits(jnp.ones((1, 2 * 8192)))
    assert not gpu.fits(jnp.ones((1, 2 * 1000)))
