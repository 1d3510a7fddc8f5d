"""`TPUv6VQIntegration`: vector quantization under document 000's names.

No TPU has a unit for vector quantization. Hardware acceleration here means the fused kernel, which
decodes a block of weights in on-chip memory and multiplies it there, on every generation.
"""

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..annotations import PyTree
from ..errors import ConfigError, TargetNotReached, TPUValidationError
from ..runtime.progress import Progress, silent
from .codebooks.codebook import Codebook, Metric, parse_metric
from .codebooks.codebook_training import check_sizes, train_codebook
from .codebooks.nearest import nearest
from .files.array_files import load_codebook, save_codebook
from .formats import VQFormat
from .model import QuantizedModel
from .quantizing import QuantizationResult, quantize_model
from .search.search import CANDIDATES

logger = logging.getLogger(__name__)

LEAST_BITS, MOST_BITS = 2, 16


class TPUv6VQIntegration:
    """Vector quantization of a model and of vectors, on any backend.

    Attributes:
        quantization_bits: Bits per value of a codebook entry.
            2 … 8 are stored as int8; 9 … 16 keep entries in float32, so 16 means "not rounded".
        vector_length: Values per code.
        codebook_size: Number of entries.
        enable_hardware_acceleration: Whether matmuls use the fused kernel on a TPU; `accelerated`
            tells whether this format has one.
        metric: "euclidean", "cosine" or "dot".
        codebook: The last codebook that was trained or loaded, or None.
        result: The result of the last `quantize_model`, or None.
    """

    def __init__(
        self,
        quantization_bits: int = 8,
        vector_length: int = 4,
        codebook_size: int = 256,
        enable_hardware_acceleration: bool = True,
        distance_metric: str = "euclidean",
    ) -> None:
        check_sizes(quantization_bits=quantization_bits)
        if not LEAST_BITS <= quantization_bits <= MOST_BITS:
            raise ConfigError(
                f"quantization_bits={quantization_bits!r}; expected a whole number from "
                f"{LEAST_BITS} to {MOST_BITS}: of each value of a codebook entry."
            )
        self.quantization_bits = quantization_bits
        self.vector_length = vector_length
        self.codebook_size = codebook_size
        self.enable_hardware_acceleration = enable_hardware_acceleration
        self.metric: Metric = parse_metric(distance_metric)
        self.codebook: Codebook | None = None
        self.result: QuantizationResult | None = None
        self.format = VQFormat(length=vector_length, entries=codebook_size)
        if enable_hardware_acceleration and not self.accelerated:
            logger.warning(
                "no fused kernel for %s: it has vectors of 4 and 128 or 256 entries; weights are "
                "decoded before they are multiplied",
                self.format.name,
            )

    @property
    def accelerated(self) -> bool:
        """Whether the fused TPU kernel is enabled and multiplies this format."""
        return self.enable_hardware_acceleration and self.format.layout == "tpu_lane_i32"

    @property
    def bits_per_value(self) -> float:
        """Bits of codes per value."""
        return self.format.bits

    def train_codebook(
        self,
        training_data: ArrayLike,
        num_iterations: int = 25,
        batch_size: int = 65_536,
        *,
        weights: ArrayLike | None = None,
        seed: int = 0,
        progress: Progress = silent,
    ) -> Codebook:
        """Fit the codebook; training stops early when the error no longer falls.

        Args:
            training_data: Vectors, or an array that can be reshaped to vectors.
            num_iterations: Largest number of passes.
            batch_size: Vectors that early passes use.
            weights: Factors of squared errors, per vector or per value.
            seed: Seed of the k-means.
            progress: Called with one line per pass.

        Raises:
            TPUValidationError: The data has too few vectors, or cannot be reshaped to vectors.
        """
        book = train_codebook(
            training_data,
            entries=self.codebook_size,
            length=self.vector_length,
            iterations=num_iterations,
            batch=batch_size,
            metric=self.metric,
            weights=weights,
            seed=seed,
            dtype="float32",
            progress=progress,
        )
        self.codebook = _rounded(book, self.quantization_bits)
        return self.codebook

    def quantize_model(
        self,
        model: object,
        calibration_data: Iterable[PyTree],
        target_accuracy_retention: float = 0.98,
        num_calibration_batches: int = 100,
        *,
        quantize_activations: bool = True,
        **options: Any,
    ) -> QuantizedModel:
        """Quantize a model by a search that may give its matrices this object's format.

        Matrices whose error is too large get more bits, up to bfloat16. Afterwards `get_metrics`
        returns the measured figures, and `result` has the whole report.

        Args:
            model: See `tpukit.quantization.quantize_model` for all arguments.
            calibration_data: Batches of data.
            target_accuracy_retention: Required lower end of the retention's interval on held-out
                batches.
            num_calibration_batches: Largest number of batches.
            quantize_activations: Whether activations are rounded to int8 at run time.
            options: Other arguments of `tpukit.quantization.quantize_model`.

        Raises:
            TargetNotReached: No plan reaches the target; `get_metrics` describes the best plan.
        """
        given = dict(options)
        given.setdefault("candidates", (self.format.name, *CANDIDATES))
        given.setdefault("activations", "int8" if quantize_activations else "wide")
        try:
            self.result = quantize_model(
                model,
                calibration_data,
                target_accuracy_retention=target_accuracy_retention,
                num_calibration_batches=num_calibration_batches,
                **given,
            )
        except TargetNotReached as error:
            if isinstance(error.best, QuantizationResult):
                self.result = error.best
            raise
        return self.result.model

    def get_metrics(self) -> dict[str, Any]:
        """Return the figures of the last `quantize_model` (`QuantReport.to_dict`).

        `compression_ratio` is against bfloat16; `inference_speedup` is `Missing`, with the reason,
        without an accelerator to measure it on.

        Raises:
            TPUValidationError: No model has been quantized.
        """
        if self.result is None:
            raise TPUValidationError(
                "There are no metrics yet: call quantize_model(model, calibration_data) first."
            )
        metrics = self.result.to_dict()
        return {**metrics, "inference_speedup": self.result.report.speedup.number}

    def measure_error(self, data: ArrayLike) -> float:
        """Return the codebook's relative squared error on data; 1 is as bad as zeros.

        With R = `bits_per_value`, the error on Gaussian values is at least 4^−R for any codebook:
        vectors of 512 values with 1024 entries have 0.02 bits per value and an error of about 97 %.
        For cosine codes each vector gets its best gain.

        Raises:
            TPUValidationError: No codebook has been trained or loaded.
        """
        book = self._book()
        vectors = jnp.asarray(data, jnp.float32).reshape(-1, book.length)
        table = book.values[0]
        if book.metric == "euclidean":
            lost = vectors - table[nearest(vectors, table)]
        else:
            products = jnp.matmul(vectors, table.T, precision=jax.lax.Precision.HIGHEST)
            chosen = table[jnp.argmax(products, axis=1)]
            gain = jnp.max(products, axis=1, keepdims=True) if book.metric == "cosine" else 1.0
            lost = vectors - gain * chosen
        return float((lost**2).sum() / (vectors**2).sum())

    @property
    def least_error(self) -> float:
        """The smallest possible relative error of these bits on Gaussian values."""
        return math.pow(4.0, -self.bits_per_value)

    def save_codebook(self, path: str | Path) -> Path:
        """Write the codebook as safetensors, whatever the suffix.

        Raises:
            TPUValidationError: There is no codebook, or the file cannot be written.
        """
        return save_codebook(path, self._book())

    def load_codebook(self, path: str | Path) -> Codebook:
        """Read a codebook and use it.

        Raises:
            TPUCheckpointError: The file is a pickle, damaged, or no codebook.
            ConfigError: The codebook has other sizes or another metric.
        """
        book = load_codebook(path)
        own = (self.vector_length, self.codebook_size, self.metric)
        if (book.length, book.size, book.metric) != own:
            raise ConfigError(
                f"{path} has {book.size} entries of {book.length} values ({book.metric}); this "
                f"integration has {own[1]} of {own[0]} ({own[2]}). Make one with those sizes."
            )
        self.codebook = book
        return book

    def _book(self) -> Codebook:
        if self.codebook is None:
            raise TPUValidationError(
                "There is no codebook yet: call train_codebook(data) or load_codebook(path)."
            )
        return self.codebook


def _rounded(book: Codebook, bits: int) -> Codebook:
    """Round entries to so many bits; above 8 bits they stay float32."""
    if bits > 8:
        return book
    largest = 2 ** (bits - 1) - 1
    scale = jnp.abs(book.entries).max() / largest
    scale = jnp.where(scale == 0, 1.0, scale).astype(jnp.float32)
    entries = jnp.round(book.entries / scale).astype(jnp.int8)
    return Codebook(entries, scale, book.metric, book.fit)
