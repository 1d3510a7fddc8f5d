"""Cross-entropy without all logits is cross-entropy: every path against float64, with gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpukit.errors import TPUKernelError
from tpukit.kernels.ops.cross_entropy import chunked
from tpukit.kernels.ops.cross_entropy.api import OP, cross_entropy
from tpukit.kernels.ops.cross_entropy.pallas_tpu import CrossEntropyBlocks

# Blocks that stick out of 40 tokens and 300 columns on every side.
BLOCKS = CrossEntropyBlocks(tokens=32, vocab=256, backward_tokens=16, backward_vocab=128)


def draw(tokens=40, width=48, vocab=300, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, vocab, tokens)
    labels[rng.random(tokens) < 0.2] = -1
    return (
        jnp.asarray(rng.normal(size=(tokens, width)), dtype),
        jnp.asarray(rng.normal(size=(width, vocab)) * 0.5, dtype),
        jnp.asarray(labels, jnp.int32),
        jnp.asarray(rng.random(tokens) + 0.5, jnp.float32),
    )


def by_numpy(x, w, labels, weights, *, z_loss, soft_cap, reduction):
    """Loss, log-normaliser and the gradients of the sum of the (weighted) losses, by hand."""
    x, w, weights = (np.asarray(array.astype(jnp.float32), np.float64) for array in (x, w, weights))
    labels = np.asarray(labels)
    raw = x @ w
    logits = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    top = logits.max(-1, keepdims=True)
    log_normaliser = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[:, 0]
    hot = np.arange(w.shape[1]) == labels[:, None]
    weights = weights * (labels >= 0)
    losses = weights * (log_normaliser - (logits * hot).sum(-1) + z_loss * log_normaliser**2)
    scale = 1 / weights.sum() if reduction == "mean" else 1.0
    loss = losses if reduction == "none" else losses.sum() * scale
    p = np.exp(logits - log_normaliser[:, None])
    slope = (p * (1 + 2 * z_loss * log_normaliser[:, None]) - hot) * weights[:, None] * scale
    if soft_cap is not None:
        slope = slope * (1 - np.tanh(raw / soft_cap) ** 2)
    return (loss, log_normaliser), (slope @ w.T, x.T @ slope)


def with_gradients(function, arrays, **options):
    def total(x, w):
        result = function(x, w, *arrays[2:], **options)
        return result.loss.sum(), result

    step = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    (_, result), gradients = step(*arrays[:2])
    return tuple(result), gradients


def assert_close(seen, expected, tolerance):
    for one, other in zip(jax.tree.leaves(seen), jax.tree.leaves(expected), strict=True):
        scale = np.abs(other).max() or 1.0
        error = np.abs(np.asarray(one, np.float64) - other).max()
        assert error <= tolerance * scale, f"{error} of {scale}"


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    ("z_loss", "soft_cap", "reduction"),
    [(0.0, None, "mean"), (0.1, None, "sum"), (0.0, 5.0, "none"), (0.1, 5.0, "mean")],
)
def test_loss_and_gradients_are_those_of_float64(implementation, z_loss, soft_cap, reduction):
    arrays = draw()
    options = {"z_loss": z_loss, "soft_cap": soft_cap, "reduction": reduction}
    seen = with_gradients(cross_entropy, arrays, implementation=implementation, **options)
    assert_close(seen, by_numpy(*arrays, **options), 3e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "interpret"),
    [
        (jnp.float32, 3e-6, pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")),
        (jnp.bfloat16, 2e-2, True),
    ],
)
def test_the_kernel_interpreted(dtype, tolerance, interpret, no_races):
    arrays = draw(dtype=dtype)
    options = {"z_loss": 0.1, "soft_cap": 5.0, "reduction": "sum"}
    counted = arrays[3] * (arrays[2] >= 0)
    kernel = OP.implementations["pallas_tpu"]
    with no_races():
        seen = with_gradients(
            kernel,
            (*arrays[:3], counted),
            blocks=BLOCKS,
            interpret=interpret,
            **options,
        )
    assert_close(seen, by_numpy(*arrays, **options), tolerance)


def test_the_gradient_of_weights_is_the_loss_of_the_token():
    x, w, labels, weights = draw()

    def total(weights, implementation):
        return cross_entropy(
            x, w, labels, weights, reduction="sum", implementation=implementation
        ).loss

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    assert_close(gradient(weights, "xla"), gradient(weights, "reference"), 1e-6)


def test_leading_axes_are_tokens_and_no_weight_at_all_is_no_loss():
    x, w, labels, _ = draw()
    flat = cross_entropy(x, w, labels)
    cube = cross_entropy(x.reshape(2, 20, -1), w, labels.reshape(2, 20))
    assert cube.loss == flat.loss
    assert cube.log_normaliser.shape == (2, 20)
    assert cross_entropy(x, w, jnp.full_like(labels, -1)).loss == 0


def test_chunks_hold_a_part_of_the_logits(monkeypatch):
    monkeypatch.setattr(chunked, "LOGITS_BYTES", 4 * 64 * 512)
    monkeypatch.setattr(chunked, "MIN_TOKENS", 8)
    arrays = draw(tokens=250, width=16, vocab=512)

    def step(implementation):
        return jax.jit(
            lambda *arrays: with_gradients(
                cross_entropy, arrays, reduction="mean", implementation=implementation
            )
        )

    assert_close(step("xla")(*arrays), step("reference")(*arrays), 3e-6)
    shapes = [
        re.findall(r"f32\[([\d,]+)\]", step(name).lower(*arrays).compile().as_text())
        for name in ("xla", "reference")
    ]
    largest = [max(np.prod([int(n) for n in s.split(",")]) for s in found) for found in shapes]
    assert largest[0] <= 64 * 512 < 250 * 512 <= largest[1]


def test_a_program_for_a_tpu_holds_the_kernel_only_where_no_gradient_is_asked_for():
    arrays = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in draw(256, 128, 512)]

    def exported(function):
        return jax.export.export(jax.jit(function), platforms=["tpu"])(*arrays).mlir_module()

    def loss(x, w, labels, weights):
        return cross_entropy(x, w, labels, weights).loss

    assert "tpu_custom_call" in exported(loss)
    assert "tpu_custom_call" not in exported(jax.grad(loss))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": jnp.zeros(3, jnp.int32)}, "one for each token, \\(40,\\)"),
        ({"labels": jnp.zeros(40)}, "expected integers"),
        ({"soft_cap": 0.0}, "must be positive"),
        ({"implementation": "pallas"}, "Did you mean 'pallas_tpu'"),
    ],
)
def test_what_is_wrong_is_said(change, message):
    x, w, labels, _ = draw()
    with pytest.raises(TPUKernelError, match=message):
        cross_entropy(**{"x": x, "w": w, "labels": labels, **change})
