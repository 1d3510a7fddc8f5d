"""The kernel of a GPU, by its meaning on a CPU: against float64, and inside the public function."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.kernels.ops.cross_entropy import chunked, triton_gpu
from tpukit.kernels.ops.cross_entropy.api import cross_entropy
from tpukit.kernels.ops.cross_entropy.terms import LossTerms


@pytest.fixture(autouse=True)
def narrow_reads(monkeypatch):
    monkeypatch.setattr(triton_gpu, "LANES", 128)


def exact(logits, labels, weights, z_loss, soft_cap):
    """Losses, log-normalisers and gradients of logits (tokens, V) by the textbook, in float64."""
    logits, weights = np.asarray(logits, np.float64), np.asarray(weights, np.float64)
    capped = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
    top = capped.max(-1, keepdims=True)
    normaliser = (top + np.log(np.exp(capped - top).sum(-1, keepdims=True)))[:, 0]
    is_label = np.arange(logits.shape[1]) == np.asarray(labels)[:, None]
    losses = normaliser - (capped * is_label).sum(-1) + z_loss * normaliser**2
    pull = (1 + 2 * z_loss * normaliser)[:, None] * np.exp(capped - normaliser[:, None])
    bend = 1 if soft_cap is None else 1 - (capped / soft_cap) ** 2
    return losses, normaliser, weights[:, None] * (pull - is_label) * bend


@pytest.mark.parametrize(
    ("vocab", "z_loss", "soft_cap"),
    [(512, 0.0, None), (600, 1e-2, 30.0)],  # 600 leaves a read half empty
)
def test_losses_and_slopes_against_float64(vocab, z_loss, soft_cap):
    keys = jax.random.split(jax.random.key(0), 2)
    logits = 4 * jax.random.normal(keys[0], (4, vocab))
    labels, weights = jnp.array([0, vocab - 1, 77, -1]), jax.random.uniform(keys[1], (4,))
    found = triton_gpu.losses_and_slopes(
        logits, labels, weights, LossTerms(z_loss, soft_cap), dtype=jnp.float32, interpret=True
    )
    for one, wanted in zip(found, exact(logits, labels, weights, z_loss, soft_cap), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("tokens", "width", "rows", "is_filled"),
    [
        (23, 4, 12, False),  # the head's gradient is the smaller array, and padding is needed,
        (23, 16, 12, False),  # the larger one,
        (23, 64, 23, False),  # and so large that a cut which has to hold it saves nothing,
        (24, 64, 4, True),  # unless chunks fill in the gradient of all logits
    ],
)
def test_the_public_function_takes_it_on_one_gpu(monkeypatch, tokens, width, rows, is_filled):
    kernel = partial(triton_gpu.losses_and_slopes, interpret=True)
    used = []
    monkeypatch.setattr(triton_gpu, "FEWEST_ADDED", 8)
    monkeypatch.setattr(triton_gpu, "FEWEST_FILLED", 4)
    filled = []
    monkeypatch.setattr(
        chunked, "filled_total", lambda *a: filled.append(a) or triton_gpu.filled_total(*a)
    )
    monkeypatch.setattr(
        triton_gpu, "losses_and_slopes", lambda *a, **k: used.append(a[0].shape) or kernel(*a, **k)
    )
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (tokens, width))
    w = 0.1 * jax.random.normal(keys[1], (width, 512))
    labels = jax.random.randint(keys[2], (tokens,), -1, 512)
    weights = jax.random.uniform(keys[3], (tokens,))

    def gradients():
        def loss(x, w, weights):
            return cross_entropy(x, w, labels, weights, z_loss=1e-3, implementation="xla").loss

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, w, weights)

    plain = gradients()
    assert not used
    monkeypatch.setattr(chunked, "on_one_gpu", lambda: True)
    fused = gradients()
    assert {shape[-2:] for shape in used} == {(rows, 512)}
    assert bool(filled) == is_filled
    for one, wanted in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-7)


def test_it_lowers_for_a_gpu_on_a_machine_without_one():
    arrays = (
        jax.ShapeDtypeStruct((32, 128256), jnp.bfloat16),
        jax.ShapeDtypeStruct((32,), jnp.int32),
        jax.ShapeDtypeStruct((32,), jnp.float32),
    )
    call = partial(triton_gpu.losses_and_slopes, terms=LossTerms(), dtype=jnp.bfloat16)
    text = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "cross_entropy_losses_and_slopes" in text
