"""Document 000's snippets of quantized models, in their own call shapes."""

import math

import jax
import numpy as np
import pytest
from flax import nnx

from tpukit.errors import TargetNotReached, TPUValidationError
from tpukit.quantization import QuantizationResult, TPUv6VQIntegration, quantize_for_tpu


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.second = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def calibration():
    return [np.random.default_rng(seed).normal(size=(64, 32)).astype("f") for seed in range(4)]


def test_the_documents_calls(caplog):
    model, calibration_dataset = Model(nnx.Rngs(0)), calibration()
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
    )
    metrics = vq_integration.get_metrics()
    assert f"{metrics['compression_ratio']:.1f}x"
    assert f"{metrics['inference_speedup']:.1f}x" == "nanx"
    assert math.isnan(metrics["inference_speedup"])
    assert "accelerator" in metrics["speedup_reason"]
    assert f"{metrics['accuracy_retention']:.2%}"
    assert metrics["reached"]

    @jax.jit
    def quantized_forward(inputs):
        return quantized_model(inputs)

    inputs = calibration_dataset[0]
    assert quantized_model.activations == "int8"
    full = model(inputs)
    assert np.abs(quantized_forward(inputs) - full).max() < 0.1 * np.abs(full).max()


def test_a_target_that_is_missed_leaves_its_metrics():
    integration = TPUv6VQIntegration(vector_length=4, codebook_size=16)
    with pytest.raises(TargetNotReached) as caught:
        integration.quantize_model(
            Model(nnx.Rngs(0)), calibration(), 1.0, candidates=("int4",), quantize_activations=False
        )
    assert isinstance(caught.value.best, QuantizationResult)
    assert integration.get_metrics()["reached"] is False


def test_the_troubleshooting_snippet():
    quantized_model = quantize_for_tpu(Model(nnx.Rngs(0)), bits=8)
    assert quantized_model(calibration()[0]).shape == (64, 8)
