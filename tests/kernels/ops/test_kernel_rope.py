"""RoPE against complex numbers in float64, forward and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUKernelError, TPUModelError
from tpukit.kernels.ops.rope import rope, rope_frequencies, rope_tables, tables_at
from tpukit.rotary import RopeScaling

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}


def truth(x, cos, sin, *, sign=1):
    """A pair of channels is a complex number, and a turn a product with another."""
    x = np.asarray(x, np.float64)
    first, second = np.split(x, 2, axis=-1)
    angle = np.asarray(cos, np.float64) + sign * 1j * np.asarray(sin, np.float64)
    turned = (first + 1j * second) * angle[..., None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize(
    ("shape", "dtype", "batched"),
    [
        ((2, 40, 2, 128), "bfloat16", False),
        ((2, 24, 4, 64), "float32", True),
    ],
    ids=["shared", "batched"],
)
def test_it_is_a_product_of_complex_numbers(shape, dtype, batched):
    rng = np.random.default_rng(0)
    _, length, _, width = shape
    x, cotangent = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    cos, sin = rope_tables(length, width, theta=100.0)
    if batched:
        cos, sin = (np.stack([table, np.roll(table, 3, axis=0)]) for table in (cos, sin))

    @jax.jit
    def run(x, cotangent):
        out, pull = jax.vjp(lambda x: rope(x, cos, sin), x)
        return out, pull(cotangent)[0]

    out, gradient = run(x, cotangent)
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    np.testing.assert_allclose(np.asarray(out, np.float64), truth(x, cos, sin), **tolerance)
    wanted = truth(cotangent, cos, sin, sign=-1)
    np.testing.assert_allclose(np.asarray(gradient, np.float64), wanted, **tolerance)


def test_tables_have_no_gradient():
    x, (cos, sin) = jnp.ones((1, 8, 1, 16)), rope_tables(8, 16)
    for gradient in jax.grad(lambda *tables: rope(x, *tables).sum(), (0, 1))(cos, sin):
        assert not gradient.any()


def test_tables_are_kept_exact_and_not_to_be_changed():
    tables = rope_tables(200_000, 64, theta=500000.0)
    assert rope_tables(200_000, 64, theta=500000.0) is tables
    angle = 199_999 * np.float64(500000.0) ** -(np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(tables.sin[-1], np.sin(angle), atol=1e-7)
    with pytest.raises(ValueError, match="read-only"):
        tables.cos[0, 0] = 2.0


def test_tables_at_positions_are_rows_of_the_tables():
    cos, sin = rope_tables(64, 32)
    positions = jnp.asarray([[3, 60], [0, 1]])
    found = tables_at(positions, rope_frequencies(32, theta=10000.0))
    np.testing.assert_allclose(found.cos, cos[positions], atol=1e-5)
    np.testing.assert_allclose(found.sin, sin[positions], atol=1e-5)


def test_linear_and_llama3_as_published():
    plain = rope_frequencies(128, theta=5e5)
    linear = rope_frequencies(128, theta=5e5, scaling=RopeScaling(factor=4.0))
    np.testing.assert_allclose(linear, plain / 4)
    llama = RopeScaling("llama3", factor=8.0)
    ratio = rope_frequencies(128, theta=5e5, scaling=llama) / plain
    wavelengths = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[wavelengths < 8192 / 4], 1.0)
    np.testing.assert_allclose(ratio[wavelengths > 8192], 1 / 8)
    middle = np.argmin(abs(wavelengths - 4096))
    blend = (8192 / wavelengths[middle] - 1) / (4 - 1)
    assert ratio[middle] == pytest.approx((1 - blend) / 8 + blend)


def test_dynamic_raises_the_base_beyond_the_trained_length():
    scaling = RopeScaling("dynamic", factor=2.0, original_max_seq_len=2048)
    plain = rope_frequencies(64, theta=1e4)
    short = rope_frequencies(64, theta=1e4, scaling=scaling, length=1000)
    np.testing.assert_allclose(short, plain)
    base = 1e4 * (2.0 * 8192 / 2048 - 1.0) ** (64 / 62)
    longer = rope_frequencies(64, theta=1e4, scaling=scaling, length=8192)
    np.testing.assert_allclose(longer, base ** -(np.arange(0, 64, 2) / 64))
    with pytest.raises(TPUKernelError, match="depends on the length"):
        rope_frequencies(64, theta=1e4, scaling=scaling)


def test_yarn_keeps_fast_channels_divides_slow_ones_and_scales_the_tables():
    scaling = RopeScaling("yarn", factor=16.0, original_max_seq_len=4096)
    plain = rope_frequencies(128, theta=1e4)
    ratio = rope_frequencies(128, theta=1e4, scaling=scaling) / plain
    # Channel 20.9 turns 32 times in 4096 positions, channel 45.02 once: 20 and 46, rounded out.
    np.testing.assert_allclose(ratio[:21], 1.0)
    np.testing.assert_allclose(ratio[46:], 1 / 16)
    at_33 = 1 - (33 - 20) / (46 - 20)
    assert ratio[33] == pytest.approx(at_33 + (1 - at_33) / 16)
    cos, _ = rope_tables(4, 128, scaling=scaling)
    assert cos[0, 0] == pytest.approx(0.1 * np.log(16.0) + 1)
    assert RopeScaling("yarn", factor=4.0, attention_factor=1.5).table_scale == 1.5


def test_refusals_teach():
    x = jnp.ones((1, 8, 1, 128))
    cos, sin = rope_tables(8, 128)
    with pytest.raises(TPUKernelError, match=r"\(8, 63\) and \(8, 64\); x is \(B, S, H, D\)"):
        rope(x, cos[:, :-1], sin)
    with pytest.raises(TPUModelError, match="Did you mean 'yarn'"):
        RopeScaling("yarnn")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TPUKernelError, match="it must be even"):
        rope_frequencies(63, theta=1e4)
    with pytest.raises(TPUModelError, match="must be above 0"):
        RopeScaling(factor=0)
    for wrong in ([1.5], "2001-01-01", True, float("nan"), -(2**63)):
        with pytest.raises(TPUModelError, match="rope scaling original_max_seq_len is"):
            RopeScaling(original_max_seq_len=wrong)
