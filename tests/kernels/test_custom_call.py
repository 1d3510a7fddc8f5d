"""`custom_call` on a target that jaxlib registers itself: LAPACK's Cholesky factor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUKernelError
from tpukit.kernels import custom_call


def test_a_registered_target_is_called():
    jnp.linalg.cholesky(jnp.eye(2))  # has jax register LAPACK's targets
    rng = np.random.default_rng(0)
    root = rng.normal(size=(4, 4)).astype(np.float32)
    matrix = root @ root.T + 4 * np.eye(4, dtype=np.float32)
    result = [jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)]

    def factor(x):
        return custom_call(
            "lapack_spotrf_ffi", x, platform="cpu", result=result, uplo=np.uint8(ord("L"))
        )

    # LAPACK counts columns first: its upper factor is our lower one of a symmetric matrix.
    found, info = jax.jit(factor)(matrix)
    assert info == 0
    np.testing.assert_allclose(np.triu(found).T, np.linalg.cholesky(matrix), rtol=1e-4)


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        ("cpu", r"no custom call 'my_custom_op' is registered for cpu; register it first"),
        ("tpu", r"for tpu; libtpu runs no foreign compiled code: write it in Pallas"),
        ("tpus", r"platform='tpus' is unknown.*Did you mean 'tpu'"),
    ],
)
def test_a_target_that_nobody_registered_is_a_named_error(platform, message):
    with pytest.raises(TPUKernelError, match=message):
        custom_call("my_custom_op", jnp.ones((2, 2)), platform=platform)


def test_no_inputs_are_refused():
    with pytest.raises(TPUKernelError, match="was given no inputs"):
        custom_call("my_custom_op", [])
