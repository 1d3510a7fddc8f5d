"""Whole models: every framework, plans, search, files, generation."""

import dataclasses
import itertools
import json
from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from tpukit.errors import (
    SliceError,
    TargetNotReached,
    TPUCheckpointError,
    TPUModelError,
    TPUValidationError,
)
from tpukit.hardware.figure import Figure
from tpukit.models import Execution, get_preset
from tpukit.models.adapters import adapt
from tpukit.models.generation import generate
from tpukit.quantization import (
    QuantizedModel,
    load_quantized,
    quantize_for_tpu,
    quantize_model,
    quantizing,
    save_quantized,
)
from tpukit.quantization.search.calibrated import Stored
from tpukit.quantization.search.candidates import FormatChoice
from tpukit.quantization.search.search import lower_hull

KEY = jax.random.key(0)
INTEGERS = ("int4", "int8", "bf16")


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(linen.relu(linen.Dense(64)(x)))


def plain_init(rng):
    return {"a": jax.random.normal(rng, (32, 64)) / 6, "b": jax.random.normal(rng, (64, 32)) / 8}


def plain_apply(params, x):
    return jax.nn.relu(x @ params["a"]) @ params["b"]


DATA = [np.random.default_rng(seed).normal(size=(64, 32)).astype("f") for seed in range(4)]


def models():
    network = Linen()
    return {
        "nnx": (Nnx(nnx.Rngs(0)), None),
        "linen": (network, network.init(KEY, DATA[0])),
        "equinox": (eqx.nn.MLP(32, 8, 64, 2, key=KEY), None),
        "plain": ((plain_init, plain_apply), plain_init(KEY)),
    }


def apart(params):
    """Return parameters with each matrix by itself: those of a file are stacked where alike."""

    def parts(leaf):
        return tuple(leaf.parts) if hasattr(leaf, "parts") else leaf

    return jax.tree.map(parts, params, is_leaf=lambda leaf: hasattr(leaf, "parts"))


@pytest.mark.parametrize("name", ["nnx", "linen", "equinox", "plain"])
def test_a_users_own_model_of_every_kind(name):
    model, params = models()[name]
    before = jax.tree.map(np.asarray, params)
    found = quantize_model(model, DATA, params=params, format="int8")
    assert isinstance(found.model, QuantizedModel)
    assert found.report.accuracy_retention > 0.95
    full = {
        "nnx": lambda x: model(x),
        "linen": lambda x: model.apply(params, x),
        "equinox": lambda x: jax.vmap(model)(x),
        "plain": lambda x: plain_apply(params, x),
    }[name](DATA[0])
    outputs = jax.jit(lambda x: found.model(x))(DATA[0])
    assert np.abs(outputs - full).max() < 0.05 * np.abs(full).max()
    assert jax.tree.all(jax.tree.map(np.array_equal, before, params))  # the user's stay
    assert found.report.speedup.value is None
    assert "accelerator" in found.report.speedup.reason
    json.dumps(found.to_dict())


def test_int4_by_gptq_loses_less_than_to_nearest():
    model, params = models()["plain"]
    data = [batch @ np.random.default_rng(9).normal(size=(32, 32)).astype("f") for batch in DATA]
    rows = {}
    for method in ("nearest", "gptq"):
        found = quantize_model(
            model, data, params=params, format="int4", integers=method, sequential=1
        )
        rows[method] = sum(row.error for row in found.report.matrices)
    assert rows["gptq"] < rows["nearest"]


def test_blocks_see_the_quantized_inputs_of_those_before():
    model, params = models()["plain"]
    once, in_turn = (
        quantize_model(model, DATA, params=params, format="int4", sequential=blocks).model.params
        for blocks in (1, 2)
    )
    assert np.array_equal(once["a"].parts[0].data, in_turn["a"].parts[0].data)
    assert not np.array_equal(once["b"].parts[0].data, in_turn["b"].parts[0].data)


def test_a_search_meets_its_target_or_says_no():
    model, _ = models()["nnx"]
    found = quantize_model(model, DATA, target_accuracy_retention=0.9, candidates=INTEGERS)
    assert found.report.reached
    assert found.report.evaluation.retention.low >= 0.9
    with pytest.raises(TargetNotReached, match="not reached") as caught:
        quantize_model(model, DATA, target_accuracy_retention=1.0, candidates=("int4",))
    best = caught.value.best
    assert (best.report.reached, best.report.target) == (False, 1.0)
    assert best.model(DATA[0]).shape == (64, 8)


def test_a_search_within_bits():
    model, params = models()["plain"]
    found = quantize_model(model, DATA, params=params, bits=14, candidates=INTEGERS)
    assert found.report.bits_per_weight <= 14
    assert {*found.report.plan.formats.values()} <= {*INTEGERS}
    with pytest.raises(TPUValidationError, match="coarsest"):
        quantize_model(model, DATA, params=params, bits=2, candidates=("int8",))


def stored_bytes(count):
    return Stored(str(count), jnp.zeros(count, jnp.int8), 0.0)


def test_the_hull_keeps_what_is_best_for_some_price():
    sizes = [(10, 8.0), (20, 4.0), (25, 3.9), (30, 1.0), (40, 2.0), (50, 0.5)]
    hull = lower_hull([FormatChoice(stored_bytes(size), cost) for size, cost in sizes])
    assert [one.nbytes for one in hull] == [10, 20, 30, 50]
    pairs = itertools.pairwise(hull)
    gains = [(a.cost - b.cost) / (b.nbytes - a.nbytes) for a, b in pairs]
    assert gains == sorted(gains, reverse=True)


@cache
def small_transformer():
    config = get_preset("tiny")
    return config, adapt(config, inputs=("inputs",), batch_shapes={}).init(KEY).params


def token_batches():
    rng = np.random.default_rng(3)
    return [{"inputs": rng.integers(0, 256, (4, 24)).astype(np.int32)} for _ in range(4)]


def test_the_reference_transformer_is_saved_loaded_and_generates(tmp_path):
    config, params = small_transformer()
    rules = [(r"\[0\]", "int8"), ("lm_head", "fp8")]
    found = quantize_model(config, token_batches(), params=params, format="int4", rules=rules)
    report = found.report
    assert report.generation is not None
    assert 0 < report.generation.value < 1.5
    assert report.evaluation.measure == "perplexity"
    folder = save_quantized(found.model, tmp_path / "q", report=report, tokenizer="bytes")
    loaded = load_quantized(folder)
    assert (loaded.config, loaded.tokenizer) == (config, "bytes")
    assert loaded.report["compression_ratio"] == report.compression_ratio
    same = jax.tree.map(np.array_equal, apart(loaded.params), apart(found.model.params))
    assert jax.tree.all(same)
    prompts = [[1, 2, 3], [4, 5]]
    wanted = generate(config, found.model.dequantized(), prompts, max_new_tokens=6, temperature=0)
    made = generate(config, loaded.params, prompts, max_new_tokens=6, temperature=0)
    assert made.tokens == wanted.tokens
    again = load_quantized(folder, like=found.model.params).params
    assert jax.tree.structure(apart(again)) == jax.tree.structure(apart(found.model.params))


def test_experts_are_matrices_of_their_own():
    config = get_preset("tiny-moe").replace(routing="dropless")
    adapter = adapt(config, inputs=("inputs",), batch_shapes={})
    params, tokens = adapter.init(KEY).params, token_batches()[0]["inputs"]
    made = quantize_for_tpu(config, params=params, rules=[("self_attention", "skip")])
    experts = made.params["layers"]["mlp"]["experts"]["up_proj"]
    assert len(experts.parts) == config.n_layers * config.n_experts
    full = quantize_for_tpu(config, bits=16, params=params).subject.apply(
        params, {"inputs": jnp.asarray(tokens)}
    )
    routed = adapter.module(params, Execution())(jnp.asarray(tokens))
    np.testing.assert_allclose(full, routed, atol=2e-3)
    error = np.abs(made(tokens) - full).max() / np.abs(full).max()
    assert 0 < error < 0.1


def test_vector_codes_in_a_loop_over_layers_beside_other_formats(tmp_path):
    params = {"stack": jax.random.normal(KEY, (3, 32, 128)), "back": jnp.ones((3, 128, 32)) / 64}

    def apply(params, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w[0]) @ w[1], None

        return jax.lax.scan(layer, x, (params["stack"], params["back"]))[0]

    found = quantize_model(
        (plain_init, apply),
        DATA,
        params=params,
        format="vq2",
        rules=[(r"stack\[2\]", "int8"), ("back", "skip")],
        codec={"refit": False},
    )
    kinds = [type(part).__name__ for part in found.model.params["stack"].parts]
    assert kinds == ["VQArray", "VQArray", "QuantizedWeight"]
    dense = apply(found.model.dequantized(), DATA[0])
    np.testing.assert_allclose(jax.jit(found.model)(DATA[0]), dense, rtol=1e-4, atol=1e-4)
    folder = save_quantized(found.model, tmp_path / "q")
    loaded = load_quantized(folder).params
    same = jax.tree.map(np.array_equal, apart(loaded), apart(found.model.params))
    assert jax.tree.all(same)
    errors = [row.error for row in found.report.matrices if row.format == "vq2"]
    assert all(0 < error < 0.2 for error in errors)


def test_damaged_and_foreign_files_are_refused(tmp_path):
    model, params = models()["plain"]
    found = quantize_for_tpu(model, params=params, inputs=DATA[0])
    folder = save_quantized(found, tmp_path / "q")
    with pytest.raises(TPUValidationError, match="not overwritten"):
        save_quantized(found, folder)
    with pytest.raises(TPUCheckpointError, match="another model"):
        load_quantized(folder, like={"a": jnp.zeros((3, 3))})
    text = (folder / "quantized.json").read_text()
    rng = np.random.default_rng(0)
    for _ in range(30):
        cut = rng.integers(len(text))
        (folder / "quantized.json").write_text(
            text[:cut] + chr(rng.integers(48, 57)) + text[cut + 1 :]
        )
        try:
            load_quantized(folder)
        except TPUCheckpointError:
            continue
    about = json.loads(text)
    about["parameters"][0]["shape"] = [5, 5]
    (folder / "quantized.json").write_text(json.dumps(about))
    with pytest.raises(TPUCheckpointError, match="contradict each other"):
        load_quantized(folder)


@pytest.mark.parametrize("bits", [8, 4, 16])
def test_quantize_for_tpu_needs_no_data(bits):
    model, _ = models()["equinox"]
    quantized_model = quantize_for_tpu(model, bits=bits)
    full = jax.vmap(model)(DATA[0])
    error = np.abs(quantized_model(DATA[0]) - full).max() / np.abs(full).max()
    assert 0 < error < {8: 0.03, 4: 0.4, 16: 0.02}[bits]
    rounded = dataclasses.replace(quantized_model, activations="int8")
    assert not np.array_equal(rounded(DATA[0]), quantized_model(DATA[0])) or bits == 16


def test_a_quantized_model_shards_as_its_matrices_do():
    model, params = models()["plain"]
    found = quantize_for_tpu(model, params=params, inputs=DATA[0])
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    where = jax.NamedSharding(mesh, jax.P(None, "x"))
    placed = jax.device_put(found.params, jax.tree.map(lambda leaf: where, found.params))
    result = jax.jit(found.apply)(placed, DATA[0])
    np.testing.assert_allclose(result, found.apply(found.params, DATA[0]), rtol=1e-4, atol=1e-5)


def test_a_speed_on_a_named_chip_is_an_estimate(monkeypatch):
    model, params = models()["plain"]
    asked = []

    def estimated(matrices, chip, **options):
        asked.append((sorted(matrices), chip, options["activations"]))
        return Figure(1.5, "×", origin="model", source="a test")

    monkeypatch.setattr(quantizing, "estimated_speedup", estimated)
    kept = {"params": params, "format": "int8", "activations": "int8"}
    report = quantize_model(model, DATA, chip="v6e", **kept).report
    assert (report.speedup.value, report.to_dict()["speedup_origin"]) == (1.5, "model")
    assert asked == [([((32, 64), "int8"), ((64, 32), "int8")], "v6e", "int8")]
    with pytest.raises(SliceError, match="v9"):
        quantize_model(model, DATA, chip="v9", **kept)


def test_what_is_missing_is_said():
    with pytest.raises(TPUModelError, match="params"):
        quantize_model(Linen(), DATA)
    with pytest.raises(TPUValidationError, match="no calibration data"):
        quantize_model(models()["plain"][0], [], params=plain_init(KEY))
    with pytest.raises(TPUValidationError, match="at most 1"):
        quantize_model(models()["nnx"][0], DATA, target_accuracy_retention=1.5)
    with pytest.raises(TPUValidationError, match="a search chooses formats itself"):
        quantize_model(models()["nnx"][0], DATA, bits=4, format="int4")
    with pytest.raises(TPUValidationError, match="8 \\(int8\\)"):
        quantize_for_tpu(models()["equinox"][0], bits=3)
