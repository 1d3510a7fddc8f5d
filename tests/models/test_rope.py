"""Rotary positions: only distances matter, and the published stretching of frequencies holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.kernels.ops.rope import rope_frequencies
from tpukit.models.transformer.config import RopeScaling
from tpukit.models.transformer.layers import apply_rope


def test_scores_depend_only_on_the_distance():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
    frequencies = rope_frequencies(16, theta=100.0)

    @jax.jit
    def score(at_q, at_k):
        turned_q = apply_rope(jnp.asarray(q), jnp.asarray([[at_q]]), frequencies)
        turned_k = apply_rope(jnp.asarray(k), jnp.asarray([[at_k]]), frequencies)
        return jnp.sum(turned_q * turned_k)

    near, as_near, nearer = (float(score(*places)) for places in ((7, 3), (104, 100), (7, 4)))
    assert near == pytest.approx(as_near, abs=1e-4)
    assert near != pytest.approx(nearer, abs=1e-3)


def test_position_zero_turns_nothing():
    x = np.random.default_rng(0).normal(size=(1, 1, 2, 8)).astype(np.float32)
    turned = jax.jit(apply_rope)(x, jnp.zeros((1, 1), jnp.int32), rope_frequencies(8, theta=1e4))
    np.testing.assert_array_equal(turned, x)


def test_linear_scaling_divides_every_frequency():
    plain = rope_frequencies(8, theta=1e4)
    scaled = rope_frequencies(8, theta=1e4, scaling=RopeScaling(factor=8.0))
    np.testing.assert_allclose(scaled * 8, plain)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    scaling = RopeScaling(kind="llama3", factor=8.0)
    plain = rope_frequencies(128, theta=5e5)
    ratio = rope_frequencies(128, theta=5e5, scaling=scaling) / plain
    wavelengths = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[wavelengths < 8192 / 4], 1.0)
    np.testing.assert_allclose(ratio[wavelengths > 8192], 1 / 8)
    assert np.all(np.diff(ratio) <= 1e-12), "between the two it falls without a jump back"
    assert 1 / 8 < ratio[(wavelengths > 2048) & (wavelengths < 8192)].mean() < 1
