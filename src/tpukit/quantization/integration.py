"""`TPUv6VQIntegration`: vector quantization under document 000's names, thin over the real objects.

No TPU has a unit for vector quantization. What the name promises is the fused kernel, which every
generation runs: it decodes a block of weights in on-chip memory and multiplies it there.
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
from .codebooks.codebook_training import train_codebook
from .codebooks.nearest import nearest
from .codebooks.vectors import check_sizes
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
        quantization_bits: Of each value of an entry: codebook entries are rounded to so many bits.
            2 … 8 are stored as int8; 9 … 16 keep entries in float32, so 16 means "not rounded".
        vector_length: Values that one code stands for.
        codebook_size: Entries.
        enable_hardware_acceleration: Whether products use the fused kernel where there is a TPU;
            `accelerated` says whether this format has one.
        metric: "euclidean", "cosine" or "dot".
        codebook: The one trained or loaded last, or None.
        result: Of the last `quantize_model`, or None.
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
        """Whether the fused TPU kernel multiplies this format, and may."""
        return self.enable_hardware_acceleration and self.format.layout == "tpu_lane_i32"

    @property
    def bits_per_value(self) -> float:
        """Bits that a code takes of each value."""
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
        """Fit the codebook; it stops early when nothing changes any more.

        Args:
            training_data: Vectors, or anything that is cut into them.
            num_iterations: Passes, at most.
            batch_size: Vectors that early passes look at.
            weights: By which errors count, of vectors or values.
            seed: Of the fit.
            progress: Called with a line for each pass.

        Raises:
            TPUValidationError: The data does not fit the sizes; the message says what would.
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
        """Quantize a model by search; this object's format is one that matrices may get.

        Matrices that lose too much in it get more bits, up to bfloat16. `get_metrics` then says
        what was measured, and `result` holds the whole report.

        Args:
            model: See `tpukit.quantization.quantize_model`, as all of these.
            calibration_data: Batches.
            target_accuracy_retention: On held-out batches, surely.
            num_calibration_batches: At most.
            quantize_activations: Whether what multiplies a quantized matrix is rounded to int8 as
                it comes.
            options: Further ones of `tpukit.quantization.quantize_model`.

        Raises:
            TargetNotReached: No plan keeps so much; `get_metrics` tells of the best one.
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
        """What the last `quantize_model` came to, as `QuantReport.to_dict` has it.

        `compression_ratio` is against bfloat16; `inference_speedup` is `Missing`, with the reason,
        where there is no accelerator to measure it on.

        Raises:
            TPUValidationError: No model was quantized yet.
        """
        if self.result is None:
            raise TPUValidationError(
                "There are no metrics yet: call quantize_model(model, calibration_data) first."
            )
        found = self.result.to_dict()
        return {**found, "inference_speedup": self.result.report.speedup.number}

    def measure_error(self, data: ArrayLike) -> float:
        """What the codebook loses of data: squared error over squares; 1 is as bad as zeros.

        A code of `bits_per_value` R cannot lose less of Gaussian values than 4^−R, however large
        the codebook: vectors of 512 with 1024 entries have 0.02 bits a value and lose about 97 %.
        Of cosine codes the error is that of the best gain for each vector.

        Raises:
            TPUValidationError: No codebook was trained or loaded.
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
        """The least relative error of any code of these bits on Gaussian values it has not seen."""
        return math.pow(4.0, -self.bits_per_value)

    def save_codebook(self, path: str | Path) -> Path:
        """Write the codebook as safetensors, whatever the name ends with.

        Raises:
            TPUValidationError: There is none yet, or it cannot be written there.
        """
        return save_codebook(path, self._book())

    def load_codebook(self, path: str | Path) -> Codebook:
        """Read a codebook and take it for this object's own.

        Raises:
            TPUCheckpointError: It is a pickle, damaged, or no codebook.
            ConfigError: It has other sizes or another metric than this object.
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
    """Entries in so many bits each: int8 up to eight, as they are above."""
    if bits > 8:
        return book
    largest = 2 ** (bits - 1) - 1
    scale = jnp.abs(book.entries).max() / largest
    scale = jnp.where(scale == 0, 1.0, scale).astype(jnp.float32)
    entries = jnp.round(book.entries / scale).astype(jnp.int8)
    return Codebook(entries, scale, book.metric, book.fit)
