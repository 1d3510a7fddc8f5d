"""Codes chosen anew for a matrix that moved: planted ones are found, and none get worse."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.quantization import VQArray
from tpukit.quantization.search.shadows import recoded

HEIGHT, WIDTH = 10, 24


def drawn(*, stages=1, length=4, entries=16, signs=False, height=HEIGHT):
    rng = np.random.default_rng(0)
    blocks = -(-height // length)
    return VQArray(
        jnp.asarray(rng.integers(0, entries, (stages, blocks, WIDTH)), jnp.uint8),
        jnp.asarray(
            rng.permutation(np.arange(-127, 127))[: entries * length * stages], jnp.int8
        ).reshape(stages, entries, length),
        jnp.asarray(rng.uniform(0.01, 0.02, WIDTH), jnp.bfloat16),
        jnp.asarray(rng.choice([-1, 1], height), jnp.int8) if signs else None,
        (height, WIDTH),
        "plain",
    )


def trellis():
    rng = np.random.default_rng(0)
    made = drawn(length=1, entries=16)
    codes = jnp.asarray(rng.integers(0, 256, (1, HEIGHT, WIDTH // 4)), jnp.uint8)
    return replace(made, codes=codes, layout="trellis2")


def lost(array, wanted):
    return float(((np.asarray(array.dequantize(), np.float64) - wanted) ** 2).sum())


@pytest.mark.parametrize("signs", [False, True])
def test_planted_codes_are_found(signs):
    """A height that is no multiple of the length: what is past it does not count."""
    array = drawn(signs=signs, height=8 if signs else HEIGHT)
    other = replace(array, codes=(array.codes + 5) % 16)
    found = recoded(array, other.dequantize())
    assert np.array_equal(found.codes[:, :2], other.codes[:, :2])
    assert np.allclose(found.dequantize(), other.dequantize(), atol=1e-5)
    assert np.array_equal(found.entries, array.entries)
    assert np.array_equal(found.scales, array.scales)


def test_every_code_is_the_nearest():
    array = drawn(height=8)
    wanted = np.random.default_rng(1).normal(size=(8, WIDTH))
    scales, entries = np.asarray(array.scales, np.float64), np.asarray(array.entries[0], np.float64)
    vectors = (wanted / scales).reshape(2, 1, 4, WIDTH)
    best = ((vectors - entries[None, :, :, None]) ** 2).sum(2).argmin(1)
    found = recoded(array, jnp.asarray(wanted, jnp.float32))
    assert (np.asarray(found.codes[0]) == best).mean() > 0.98


@pytest.mark.parametrize("array", [drawn(stages=2, length=2), trellis()], ids=["stages", "trellis"])
def test_none_get_worse(array):
    """Searches that are not exhaustive keep what was there where it is nearer."""
    own = np.asarray(array.dequantize(), np.float64)
    assert np.array_equal(recoded(array, array.dequantize()).dequantize(), array.dequantize())
    moved = own + np.random.default_rng(2).normal(size=own.shape) * np.abs(own).mean()
    found = recoded(array, jnp.asarray(moved, jnp.float32))
    assert lost(found, moved) < 0.7 * lost(array, moved)
    assert (found.codes.shape, found.codes.dtype) == (array.codes.shape, array.codes.dtype)


def test_choices_of_a_trellis_and_back():
    array = trellis()
    assert np.array_equal(array.with_choices(array.choices()).codes, array.codes)
