"""Document 000's snippets of quantized models, in their own call shapes, with anybody's model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tpukit.errors import TargetNotReached, TPUValidationError
from tpukit.hardware.missing import Missing
from tpukit.models import Execution, get_preset
from tpukit.models.adapters import TransformerAdapter
from tpukit.quantization import QuantizationResult, TPUv6VQIntegration, quantize_for_tpu


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.second = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def calibration():
    return [np.random.default_rng(seed).normal(size=(64, 32)).astype("f") for seed in range(4)]


def plain_init(rng):
    first, second = jax.random.split(rng)
    return {
        "first": jax.random.normal(first, (32, 64)) / 6,
        "second": jax.random.normal(second, (64, 8)) / 8,
    }


def plain_apply(params, x):
    return jax.nn.relu(x @ params["first"]) @ params["second"]


OURS = get_preset("tiny").replace(vocab_size=16, n_layers=1, max_seq_len=16)
KINDS = ("nnx", "equinox", "plain", pytest.param("ours", marks=pytest.mark.slow))


def of_kind(kind):
    """A model, what else the calls are given, data, and what the model makes of a batch."""
    if kind == "nnx":
        model = Model(nnx.Rngs(0))
        return model, {}, calibration(), model
    if kind == "equinox":
        model = eqx.nn.MLP(32, 8, 64, 1, key=jax.random.key(0))
        return model, {}, calibration(), jax.vmap(model)
    if kind == "plain":
        params = plain_init(jax.random.key(0))
        functions = (plain_init, plain_apply)
        return functions, {"params": params}, calibration(), lambda x: plain_apply(params, x)
    params = TransformerAdapter(OURS).init(jax.random.key(0)).params
    tokens = [np.random.default_rng(seed).integers(0, 16, (4, 8)) for seed in range(3)]
    return OURS, {"params": params}, tokens, TransformerAdapter(OURS).module(params, Execution())


@pytest.mark.parametrize("kind", KINDS)
def test_the_documents_calls(kind):
    model, given, calibration_dataset, full = of_kind(kind)
    vq_integration = TPUv6VQIntegration(
        quantization_bits=8,
        vector_length=512,
        codebook_size=1024,
        enable_hardware_acceleration=True,
        distance_metric="euclidean",
    )
    with pytest.raises(TPUValidationError, match="no metrics yet"):
        vq_integration.get_metrics()
    quantized_model = vq_integration.quantize_model(
        model=model,
        calibration_data=calibration_dataset,
        target_accuracy_retention=0.90,
        num_calibration_batches=100,
        candidates=(vq_integration.format.name, "int8", "bf16"),  # for time; more by default
        **given,
    )
    metrics = vq_integration.get_metrics()
    assert f"{metrics['compression_ratio']:.1f}x"
    assert f"{metrics['inference_speedup']:.1f}x" == "–x"
    assert metrics["inference_speedup"] == Missing(metrics["speedup_reason"])
    assert "accelerator" in metrics["speedup_reason"]
    assert f"{metrics['accuracy_retention']:.2%}"
    assert metrics["reached"]

    @jax.jit
    def quantized_forward(inputs):
        return quantized_model(inputs)

    inputs = calibration_dataset[0]
    assert quantized_model.activations == "int8"
    expected = full(jnp.asarray(inputs))
    assert np.abs(quantized_forward(inputs) - expected).max() < 0.1 * np.abs(expected).max()


def test_a_target_that_is_missed_leaves_its_metrics():
    integration = TPUv6VQIntegration(vector_length=4, codebook_size=16)
    with pytest.raises(TargetNotReached) as caught:
        integration.quantize_model(
            Model(nnx.Rngs(0)), calibration(), 1.0, candidates=("int4",), quantize_activations=False
        )
    assert isinstance(caught.value.best, QuantizationResult)
    assert integration.get_metrics()["reached"] is False


@pytest.mark.parametrize("kind", KINDS)
def test_the_troubleshooting_snippet(kind):
    model, given, data, full = of_kind(kind)
    quantized_model = quantize_for_tpu(model, bits=8, **given)
    expected = full(jnp.asarray(data[0]))
    seen = quantized_model(data[0])
    assert np.abs(seen - expected).max() < 0.05 * np.abs(expected).max()
