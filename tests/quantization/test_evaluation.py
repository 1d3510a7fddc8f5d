"""Measures against float64 numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.quantization.measures.evaluation import QuantizationEvaluator

RNG = np.random.default_rng(0)


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_a_language_models_measures():
    inputs = RNG.integers(0, 11, (6, 9)).astype(np.int32)
    targets = np.where(RNG.random((6, 9)) < 0.8, RNG.integers(0, 11, (6, 9)), -1).astype(np.int32)
    tables = [RNG.normal(size=(11, 11)).astype(np.float32) for _ in range(2)]

    def apply(params, batch):
        return params[batch["inputs"]]

    batches = [
        {"inputs": jnp.asarray(inputs[part]), "targets": jnp.asarray(targets[part])}
        for part in (slice(0, 4), slice(4, 6))
    ]
    found = QuantizationEvaluator(apply, jnp.asarray(tables[0]), batches)(jnp.asarray(tables[1]))
    p, q = (log_softmax(table[inputs]) for table in tables)
    known = targets >= 0
    loss = [-np.take_along_axis(x, np.maximum(targets, 0)[..., None], -1)[..., 0] for x in (p, q)]
    retention = np.exp((loss[0][known].sum() - loss[1][known].sum()) / known.sum())
    assert found.measure == "perplexity"
    assert found.retention.value == pytest.approx(retention, rel=1e-5)
    assert found.kl is not None
    assert found.agreement is not None
    assert found.kl.value == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-5)
    assert found.agreement.value == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert found.retention.low < found.retention.value < found.retention.high
    assert (found.rows, found.places) == (6, 54)


def test_without_targets_the_next_token_is_the_target():
    inputs = jnp.asarray(RNG.integers(0, 5, (4, 6)))
    table = jnp.asarray(RNG.normal(size=(5, 5)).astype(np.float32))
    found = QuantizationEvaluator(
        lambda params, batch: params[batch["inputs"]], table, [{"inputs": inputs}]
    )
    assert found.measure == "perplexity"
    assert found(table).retention.value == pytest.approx(1)


def test_classes_agreement_and_plain_outputs():
    x, labels = RNG.normal(size=(32, 4)).astype(np.float32), RNG.integers(0, 3, 32)
    weights = [jnp.asarray(RNG.normal(size=(4, 3)).astype(np.float32)) for _ in range(2)]

    def apply(params, batch):
        return batch["inputs"] @ params

    labelled = {"inputs": jnp.asarray(x), "targets": jnp.asarray(labels)}
    choices = [(x @ np.asarray(w)).argmax(-1) for w in weights]
    found = QuantizationEvaluator(apply, weights[0], [labelled])(weights[1])
    right = [(choice == labels).sum() for choice in choices]
    assert found.measure == "accuracy"
    assert found.retention.value == pytest.approx(right[1] / right[0])
    found = QuantizationEvaluator(apply, weights[0], [{"inputs": jnp.asarray(x)}])(weights[1])
    assert found.measure == "agreement"
    assert found.retention.value == pytest.approx((choices[0] == choices[1]).mean())
    found = QuantizationEvaluator(lambda p, b: (b["inputs"] @ p)[:, 0], weights[0], [labelled])(
        weights[1]
    )
    y = [(x.astype(np.float64) @ np.asarray(w, np.float64))[:, 0] for w in weights]
    expected = 1 - ((y[0] - y[1]) ** 2).sum() / (y[0] ** 2).sum()
    assert found.measure == "output"
    assert found.kl is None
    assert found.retention.value == pytest.approx(expected, rel=1e-4)
