"""Which formats a search chooses: measured once, shared, and within bytes."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUValidationError
from tpukit.quantization.plan import make_plan
from tpukit.quantization.search.calibrated import Calibrated, RoundingMethod, Stored
from tpukit.quantization.search.candidates import expected_costs, make_candidates, total_bytes
from tpukit.quantization.search.search import Ladder
from tpukit.quantization.subject import make_subject

FORMATS = ("int4", "int8", "bf16")


def apply(params, x):
    hidden = jax.nn.relu(x @ params["loud"])
    return (hidden + 0.01 * jax.nn.relu(x @ params["quiet"])) @ params["out"]


@cache
def calibrated():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        name: jax.random.normal(key, shape) / np.sqrt(shape[0])
        for name, key, shape in zip(
            ("loud", "quiet", "out"), keys, [(128, 32), (128, 32), (32, 32)], strict=True
        )
    }
    rng = np.random.default_rng(0)
    batches = [jnp.asarray(rng.normal(size=(32, 128)), jnp.float32) for _ in range(3)]
    subject = make_subject((lambda key: params, apply), params, batches[0])
    said = []
    found = Calibrated.of(subject, batches[:2], batches[2:], RoundingMethod(), said.append)
    plan = make_plan(found.matrices, "int4", rules=[("out", "skip")])
    return found, plan


@cache
def ladder():
    return Ladder.of(make_candidates(*calibrated(), FORMATS))


def test_every_matrix_is_quantized_once_for_all_sizes_and_targets(monkeypatch):
    found, plan = calibrated()
    made, store = [], Calibrated.store

    def counted(self, names, format, seen):
        made.extend((name, format) for name in names)
        return store(self, names, format, seen)

    monkeypatch.setattr(Calibrated, "store", counted)
    own = Ladder.of(make_candidates(found, plan, FORMATS))
    own.within(16 * 8192 / 8)
    own.within(6 * 8192 / 8)
    own.until(0.5, len(own.upgrades))
    assert sorted(made) == sorted((name, format) for name in plan.quantized for format in FORMATS)


def test_bytes_go_where_outputs_feel_them():
    chosen = ladder().within(6.5 * ladder().candidates.weights / 8)
    assert total_bytes(chosen) <= 6.5 * ladder().candidates.weights / 8
    assert chosen["loud"].stored.format == "int8"
    assert chosen["quiet"].stored.format == "int4"
    candidates = ladder().candidates
    other = {
        "loud": candidates.uniform("int4")["loud"],
        "quiet": candidates.uniform("int8")["quiet"],
    }
    assert total_bytes(other) == total_bytes(chosen)
    assert candidates.measure(chosen).kl.value < candidates.measure(other).kl.value / 4


def test_a_search_that_cannot_be_so_small_says_how_small_it_can_be():
    with pytest.raises(TPUValidationError, match="coarsest plan takes"):
        ladder().within(100)
    with pytest.raises(TPUValidationError, match="no candidate in vq2"):
        ladder().candidates.uniform("vq2")


def stored(error, size=1):
    return Stored(f"at {error}", jnp.zeros(size, jnp.int8), error)


def test_costs_follow_what_was_measured():
    """KL = 3·error² between the coarsest and the middle one, and with the error below that."""
    rows = [stored(error) for error in (0.4, 0.2, 0.1, 0.05)]
    measured = []

    def kl(one):
        measured.append(one.error)
        return 3 * one.error**2

    found = expected_costs(rows, kl)
    assert measured == [0.4, 0.1]
    assert found == pytest.approx([3 * 0.16, 3 * 0.04, 3 * 0.01, 3 * 0.005])
    assert expected_costs(rows, lambda one: 0.0) == [0, 0, 0, 0]
