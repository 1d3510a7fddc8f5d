"""The gated activation and its gradient against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUKernelError
from tpukit.kernels.ops.gated_activation import PASSES, gated_activation, has_kernel

OPTIONS = {"reference": {}, "triton": {"interpret": True}}


@pytest.mark.parametrize("width", [256, 768])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_against_float64(name, width):
    both = 3 * jax.random.normal(jax.random.key(0), (3, 5, 2 * width))
    d = jax.random.normal(jax.random.key(1), (3, 5, width))
    (d_both,) = jax.jit(lambda *a: PASSES[name].backward(*a, **OPTIONS[name]))(both, d)
    (g, v), c = np.split(np.asarray(both, np.float64), 2, axis=-1), np.asarray(d, np.float64)
    share = 1 / (1 + np.exp(-g))
    wanted = np.concatenate([c * v * (share + g * share * (1 - share)), c * g * share], axis=-1)
    np.testing.assert_allclose(d_both, wanted, rtol=1e-5, atol=1e-5)


def test_narrow_rows_are_left_to_xla():
    assert has_kernel(jnp.ones((1, 2 * 8192)))
    assert not has_kernel(jnp.ones((1, 2 * 1000)))


def test_it_is_left_to_xla_on_a_tpu_and_an_unknown_name_is_refused():
    both = jnp.ones((2, 512), jnp.bfloat16)
    lowered = jax.jit(gated_activation).trace(both).lower(lowering_platforms=("tpu",))
    assert "custom_call" not in lowered.as_text()
    with pytest.raises(TPUKernelError, match="it has triton, reference"):
        gated_activation(both, implementation="pallas_tpu")
