"""Document 000's calls on `TPUv6VQIntegration`, as they stand there."""

import numpy as np
import pytest

from tpukit.errors import ConfigError, TPUValidationError
from tpukit.quantization import TPUv6VQIntegration


def vectors(count, length, seed=0):
    return np.random.default_rng(seed).standard_normal((count, length)).astype(np.float32)


def test_the_documents_codebook_calls(tmp_path, caplog):
    vq_integration = TPUv6VQIntegration(
        quantization_bits=8,
        vector_length=512,
        codebook_size=1024,
        enable_hardware_acceleration=True,
        distance_metric="euclidean",
    )
    assert "no fused kernel" in caplog.text
    assert not vq_integration.accelerated
    train_vectors = vectors(1100, 512)
    codebook = vq_integration.train_codebook(
        training_data=train_vectors, num_iterations=3, batch_size=1024
    )
    assert codebook.entries.shape == (1, 1024, 512)
    place = tmp_path / "codebooks" / "model_vq.pkl"
    vq_integration.save_codebook(place)
    vq_integration.load_codebook(place)
    assert np.array_equal(vq_integration.codebook.entries, codebook.entries)
    # What such long vectors cost: 10 bits for 512 values keep next to nothing.
    error = vq_integration.measure_error(vectors(500, 512, seed=1))
    assert error > vq_integration.least_error > 0.97


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "dot_product"])
def test_every_metric_of_the_document(metric):
    one = TPUv6VQIntegration(8, 4, 16, distance_metric=metric)
    one.train_codebook(vectors(500, 4), num_iterations=10)
    assert 0.05 < one.measure_error(vectors(500, 4, seed=1)) < 0.9


def test_more_bits_of_entries_lose_less():
    errors = []
    for bits in (2, 3, 4, 8, 16):
        one = TPUv6VQIntegration(bits, 4, 64)
        one.train_codebook(vectors(2000, 4), num_iterations=10)
        errors.append(one.measure_error(vectors(2000, 4, seed=1)))
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] == pytest.approx(errors[4], rel=0.01)
    assert one.codebook.entries.dtype == np.float32  # 16: not rounded


def test_the_fused_format_is_accelerated():
    assert TPUv6VQIntegration(8, 4, 256).accelerated
    assert not TPUv6VQIntegration(8, 4, 256, enable_hardware_acceleration=False).accelerated


def test_what_is_wrong_is_said(tmp_path):
    for bits in (1, 17, 8.0, True):
        with pytest.raises(TPUValidationError, match="quantization_bits"):
            TPUv6VQIntegration(bits)
    with pytest.raises(TPUValidationError, match="entries=1 "):
        TPUv6VQIntegration(codebook_size=1)
    one = TPUv6VQIntegration(8, 4, 16)
    with pytest.raises(TPUValidationError, match="no codebook yet"):
        one.save_codebook(tmp_path / "x")
    one.train_codebook(vectors(100, 4), num_iterations=2)
    one.save_codebook(tmp_path / "x")
    with pytest.raises(ConfigError, match="16 entries of 4 values"):
        TPUv6VQIntegration(8, 4, 32).load_codebook(tmp_path / "x")
