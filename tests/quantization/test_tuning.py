"""Tuning: spoiled numbers are found again, codes follow, and bytes stay."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUValidationError
from tpukit.kernels.ops.quantized_matmul.weight import pack_int8
from tpukit.models.stored.calibration import find_matrices
from tpukit.models.stored.running import dense_parameters
from tpukit.parallel import create_mesh
from tpukit.quantization import VQArray, quantize_model, tune_parameters
from tpukit.quantization.integers import ScaledInputs
from tpukit.quantization.measures.evaluation import QuantizationEvaluator
from tpukit.quantization.model import with_parts
from tpukit.quantization.search.shadows import pulled
from tpukit.quantization.search.tuning import Continuous
from tpukit.quantization.subject import make_subject
from tpukit.quantization.vector_codes.trellis import pack_bits

WIDTH = 16
NAMES = ("vector", "trellis", "integers", "scaled", "narrow")


def apply(params, x):
    for name in NAMES:
        x = jnp.tanh(x @ params[name])
    return x @ params["lm_head"] + params["bias"]


def drawn(seed=0):
    return np.random.default_rng(seed)


@cache
def true_parts():
    """A matrix in every kind of format, of codes that nobody chose."""
    rng = drawn()
    scales = jnp.asarray(rng.uniform(0.004, 0.008, WIDTH), jnp.bfloat16)

    def entries(*shape):
        return jnp.asarray(rng.integers(-99, 99, shape), jnp.int8)

    vector = VQArray(
        jnp.asarray(rng.integers(0, 8, (2, WIDTH // 2, WIDTH)), jnp.uint8),
        entries(2, 8, 2),
        scales,
        jnp.asarray(rng.choice([-1, 1], WIDTH), jnp.int8),
        (WIDTH, WIDTH),
        "plain",
    )
    bits = pack_bits(jnp.asarray(rng.integers(0, 4, (WIDTH, WIDTH))), 2)
    trellis = VQArray(bits[None], entries(1, 16, 1), scales, None, (WIDTH, WIDTH), "trellis2")
    values = jnp.asarray(rng.integers(-99, 99, (WIDTH, WIDTH)), jnp.int8)
    integers = pack_int8(values, scales.astype(jnp.float32))
    scaled = ScaledInputs(integers, jnp.asarray(rng.uniform(0.5, 2, WIDTH), jnp.float32))
    narrow = jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 4, jnp.bfloat16)
    return dict(zip(NAMES, (vector, trellis, integers, scaled, narrow), strict=True))


def data(seed, batches):
    rng = drawn(seed)
    return [jnp.asarray(rng.normal(size=(32, WIDTH)), jnp.float32) for _ in range(batches)]


@cache
def subject():
    """The full model: what the parts stand for, and two arrays that are never quantized."""
    rng = drawn(7)
    params = {name: jnp.zeros((WIDTH, WIDTH)) for name in NAMES}
    params["lm_head"] = jnp.asarray(rng.normal(size=(WIDTH, 8)), jnp.float32)
    params["bias"] = jnp.zeros(8)
    matrices = find_matrices(apply, params, data(0, 1)[0])
    full = dense_parameters(with_parts(params, matrices, true_parts()))
    return make_subject((lambda key: full, apply), full, data(0, 1)[0]), matrices


def spoiled():
    """The parameters with all numbers beside the codes changed by some percent."""
    full, matrices = subject()
    tree = Continuous.of(with_parts(full.params, matrices, true_parts()))
    rng = drawn(3)
    return tree.stored(tuple(jnp.asarray(rng.normal(size=o.shape) * 0.1) for o in tree.start))


def kl(stored, batches):
    full, _ = subject()
    return QuantizationEvaluator(full.apply, full.params, batches).kl(dense_parameters(stored))


@cache
def tuned():
    said: list[str] = []
    found = tune_parameters(subject()[0], spoiled(), data(1, 8), steps=50, progress=said.append)
    return *found, said


def test_spoiled_numbers_are_found_again_on_data_nobody_tuned_on():
    stored, report, said = tuned()
    assert kl(stored, data(2, 2)) < 0.4 * kl(spoiled(), data(2, 2))
    assert report.after < 0.4 * report.before
    assert report.steps == said[-1].done == 50
    assert report.best in [one.done for one in said]
    assert "of 50 steps" in report.text()


def test_bytes_stay_and_vector_codes_follow():
    pairs = list(zip(*map(jax.tree.leaves, (spoiled(), tuned()[0])), strict=True))
    assert all((old.shape, old.dtype) == (new.shape, new.dtype) for old, new in pairs)
    old, new = (tree["vector"].parts[0] for tree in (spoiled(), tuned()[0]))
    assert np.array_equal(old.signs, new.signs)
    assert not np.array_equal(old.entries, new.entries)
    assert not np.array_equal(old.scales, new.scales)
    assert tuned()[0]["trellis"].parts[0].layout == "trellis2"
    weight = tuned()[0]["scaled"].parts[0].weight
    assert np.array_equal(weight.data, true_parts()["scaled"].weight.data)
    assert not tuned()[0]["bias"].any()  # an array of zeros has no size to change by
    both = [[tree[name].parts[0] for name in NAMES[:2]] for tree in (spoiled(), tuned()[0])]
    changed = [(a.choices() != b.choices()) for a, b in zip(*both, strict=True)]
    share = sum(int(one.sum()) for one in changed) / sum(one.size for one in changed)
    assert tuned()[1].recoded == pytest.approx(share)
    assert share > 0


@pytest.mark.slow
def test_codes_stay_where_that_is_asked_for():
    stored, report = tune_parameters(subject()[0], spoiled(), data(1, 8), steps=50, codes=False)
    assert report.recoded == 0
    assert kl(stored, data(2, 2)) < 0.2 * kl(spoiled(), data(2, 2))
    assert report.after < 0.2 * report.before
    for name in NAMES[:2]:
        old, new = (tree[name].parts[0] for tree in (spoiled(), stored))
        assert np.array_equal(old.codes, new.codes)


def test_gradients_of_a_decoded_matrix_go_to_its_shadow():
    vector = true_parts()["vector"]
    exact = vector.dequantize()

    def size(moves):
        return (pulled(vector, moves) ** 2).sum()

    moves = (jnp.ones((WIDTH, WIDTH)),)
    assert float(size(moves)) == pytest.approx(float((exact**2).sum()), rel=1e-5)
    assert np.allclose(jax.grad(size)(moves)[0], 2 * exact, atol=1e-5)


@pytest.mark.slow
def test_batches_of_several_shapes():
    some = [batch[: 32 - 8 * (number % 2)] for number, batch in enumerate(data(1, 8))]
    _, report = tune_parameters(subject()[0], spoiled(), some, steps=20)
    assert report.after < report.before


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers():
    again, _ = tune_parameters(subject()[0], spoiled(), data(1, 8), steps=50)
    assert jax.tree.all(jax.tree.map(np.array_equal, again, tuned()[0]))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int4", "vq:1x16x4"])
def test_devices_that_share_batches_find_the_same_numbers(format):
    mesh = create_mesh({"data": 2}, devices=jax.devices()[:2])
    alone, shared = (quantized(format=format, tune=10, mesh=one) for one in (None, mesh))
    assert shared.tuning.after == pytest.approx(alone.tuning.after, rel=1e-3)
    assert shared.evaluation.kl.value == pytest.approx(alone.evaluation.kl.value, rel=1e-3)


def test_a_tuning_that_gains_nothing_changes_nothing():
    weight = true_parts()["vector"]
    params = {"only": weight.dequantize()}

    def product(params, x):
        return x @ params["only"]

    full = make_subject((lambda key: params, product), params, data(0, 1)[0])
    exact = with_parts(params, find_matrices(product, params, data(0, 1)[0]), {"only": weight})
    found, report = tune_parameters(full, exact, data(1, 4), steps=3, rate=0.5)
    assert (report.best, report.after) == (0, report.before)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, exact))


def test_entries_stay_within_int8():
    tree = Continuous.of(true_parts()["vector"])
    grown = tree.stored(tuple(jnp.full(one.shape, 9.0) for one in tree.start))
    assert (grown.entries.dtype, int(grown.entries.max())) == (jnp.int8, 127)
    used = tree.params(tuple(jnp.full(one.shape, 9.0) for one in tree.start))
    assert int(used.entries.max()) == 127  # what is trained is what is kept


def test_an_opened_trellis_is_the_same_matrix():
    trellis = true_parts()["trellis"]
    opened = trellis.opened()
    assert (opened.layout, opened.codes.shape) == ("plain", (1, WIDTH, WIDTH))
    assert np.array_equal(opened.dequantize(), trellis.dequantize())
    assert true_parts()["vector"].opened() is true_parts()["vector"]


def two_layers(params, x):
    return jnp.tanh(x @ params["first"]) @ params["second"]


def quantized(**options):
    rng = drawn(5)
    params = {name: jnp.asarray(rng.normal(size=(32, 32)) / 4, jnp.float32) for name in TWO}
    batches = [jnp.asarray(rng.normal(size=(64, 32)), jnp.float32) for _ in range(8)]
    return quantize_model(
        (lambda key: params, two_layers),
        batches[:6],
        params=params,
        evaluation_data=batches[6:],
        integers="nearest",
        sequential=1,
        **options,
    ).report


TWO = ("first", "second")


def test_quantize_model_tunes_at_the_same_bytes():
    before, after = quantized(format="int4"), quantized(format="int4", tune=40)
    assert before.tuning is None
    assert after.stored_bytes == before.stored_bytes
    assert after.evaluation.kl.value < before.evaluation.kl.value
    assert after.to_dict()["tuning"]["steps"] == 40
    assert any(name.startswith("tuned") for name, _ in after.facts())


@pytest.mark.slow
def test_codes_that_follow_lose_less_than_codes_that_stay():
    fixed, moved = (
        quantized(format="vq:1x16x4", tune=300, tune_codes=codes) for codes in (False, True)
    )
    assert (fixed.tuning.recoded, fixed.stored_bytes) == (0, moved.stored_bytes)
    assert moved.tuning.recoded > 0
    assert moved.evaluation.kl.value < 0.95 * fixed.evaluation.kl.value


@pytest.mark.slow
def test_a_search_for_a_target_measures_plans_once_they_are_tuned():
    """A target between what the coarsest plan keeps as it is, and tuned."""
    kept = [quantized(format="int4", tune=tune).evaluation.retention.low for tune in (0, 40)]
    assert kept[0] < kept[1]
    wanted = {"target_accuracy_retention": sum(kept) / 2, "candidates": ("int4", "int8")}
    sizes = [quantized(**wanted, tune=tune).bits_per_weight for tune in (0, 40)]
    assert sizes[1] < sizes[0]


def test_what_cannot_be_is_said():
    with pytest.raises(TPUValidationError, match="at least one step"):
        tune_parameters(subject()[0], spoiled(), data(1, 2), steps=0)
    with pytest.raises(TPUValidationError, match="tune=-1"):
        quantize_model((None, apply), data(1, 2), tune=-1)
