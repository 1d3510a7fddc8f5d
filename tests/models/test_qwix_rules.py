"""Rules for anybody's own flax model: qwix makes the products that ours would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from tpukit.errors import TPUModelError
from tpukit.models.matmul.eight_bit import float8_static_matmul
from tpukit.models.matmul.rules import qwix_rules, with_qwix


class TwoLayers(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8, use_bias=False, name="out")(
            linen.Dense(16, use_bias=False, name="wide")(x)
        )


# qwix 0.1.8 asks flax for a name that is on its way out.
@pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning")
def test_a_linen_model_multiplies_as_the_reference_transformers_do():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32)), jnp.float32)
    variables = TwoLayers().init(jax.random.key(0), x)
    narrow = with_qwix(TwoLayers(), [(".*", "float8_static"), ("out", "dtype")])

    def expected(weights):
        hidden = float8_static_matmul(x, weights["params"]["wide"]["kernel"])
        return jnp.sum(jnp.sin(hidden @ weights["params"]["out"]["kernel"]))

    def found(weights):
        return jnp.sum(jnp.sin(narrow.apply(weights, x)))

    values = [jax.value_and_grad(one)(variables) for one in (found, expected)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *values)


def test_a_format_that_qwix_makes_otherwise_is_refused():
    with pytest.raises(TPUModelError, match="'int8' is not supported for flax models"):
        qwix_rules([("out", "int8")])
