"""The loss is cross-entropy by its definition, whatever is masked and however it is cut."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUModelError
from tpukit.models.loss import WeightedLoss, default_loss, next_token_loss

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 5, 7)) * 3
TARGETS = RNG.integers(0, 7, (2, 5))


def by_definition(logits, targets, z_loss=0.0):
    total = 0.0
    for row, target in zip(logits.reshape(-1, 7), targets.reshape(-1), strict=True):
        if target >= 0:
            normaliser = np.log(np.exp(row).sum())
            total += normaliser - row[target] + z_loss * normaliser**2
    return total


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_against_the_definition(z_loss):
    targets = np.where(RNG.random((2, 5)) < 0.4, -1, TARGETS)
    loss = next_token_loss(jnp.asarray(LOGITS), jnp.asarray(targets), z_loss=z_loss)
    assert float(loss.total) == pytest.approx(by_definition(LOGITS, targets, z_loss), rel=1e-5)
    assert float(loss.weight) == (targets >= 0).sum()


def test_bfloat16_logits_are_summed_in_float32():
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    loss = next_token_loss(logits, jnp.asarray(TARGETS))
    assert loss.total.dtype == jnp.float32
    exact = by_definition(np.asarray(logits, np.float64), TARGETS)
    assert float(loss.total) == pytest.approx(exact, rel=1e-5)


def test_a_scalar_output_is_the_loss_itself():
    assert default_loss(jnp.asarray(2.5), {}) == 2.5


def test_logits_are_compared_with_the_targets():
    loss = default_loss(jnp.asarray(LOGITS), {"targets": jnp.asarray(TARGETS)})
    assert isinstance(loss, WeightedLoss)
    assert float(loss.total) == pytest.approx(by_definition(LOGITS, TARGETS), rel=1e-5)


@pytest.mark.parametrize("batch", [{}, {"targets": jnp.zeros((2, 5))}, {"targets": jnp.zeros(2)}])
def test_anything_else_needs_a_loss(batch):
    with pytest.raises(TPUModelError, match=r"returns \(2, 5, 7\), but without loss="):
        default_loss(jnp.asarray(LOGITS), batch)
