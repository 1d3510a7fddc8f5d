"""`QuantizedWeight`: a matrix in int8, int4, fp8 or vector-quantized form, as kernels read it.

Formats of a (K, N) matrix whose columns are output channels. K is padded to a multiple of 128.

| format | data | scales | codebook |
|---|---|---|---|
| int8 | int8 (K, N) | (1, N) | |
| fp8 | float8_e4m3fn (K, N) | (1, N) | |
| int4 | int32 words (K/8, N): rows 8r … 8r+7, the lowest bits first | (K/group, N) | |
| vq | uint8 codes (stages, K/4, N), each for 4 rows of a column | (1, N) | int32 words \
(stages, entries/128, 128): 4 int8 values, the lowest bits first |

Words of 32 bits are what the TPU's lane gather moves and what `bitcast` spreads over rows, so a
kernel reads both packings without a shuffle.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from ....annotations import PyTree
from ....errors import TPUKernelError, did_you_mean
from ....hardware.formats import INT4
from ....hardware.stored_formats import WEIGHT_FORMATS
from ....shown import Shown
from ...blocks.tiling import LANES

WeightFormat: TypeAlias = Literal["int8", "int4", "fp8", "vq"]
FORMATS: tuple[str, ...] = get_args(WeightFormat)
INT4_PER_WORD = 32 // INT4.bits
VQ_LENGTH = WEIGHT_FORMATS["vq"].group
# What one code or word of `data` holds of a column.
ROWS_PER_ELEMENT = {"int8": 1, "fp8": 1, "int4": INT4_PER_WORD, "vq": VQ_LENGTH}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("data", "scales", "codebook"),
    meta_fields=("format", "shape"),
)
@dataclass(frozen=True)
class QuantizedWeight(Shown):
    """A quantized (K, N) matrix; see the module for what the arrays hold.

    Attributes:
        data: Values, packed values or codes.
        scales: float32: what values are multiplied with.
        codebook: Of "vq", else None.
        format: "int8", "int4", "fp8" or "vq".
        shape: (K, N) before padding.
    """

    data: jax.Array
    scales: jax.Array
    codebook: jax.Array | None
    format: WeightFormat
    shape: tuple[int, int]

    @property
    def group(self) -> int:
        """How many rows share a scale; all of them but for int4."""
        return padded_rows(self.format, self.data) // self.scales.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of data, scales and codebook together."""
        return array_bytes(self)

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage for each of the K·N weights, padding, scales and codebook included."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    def to_dict(self) -> dict[str, Any]:
        """Format, shape and size."""
        return {
            "format": self.format,
            "shape": list(self.shape),
            "group": self.group,
            "entries": None if self.codebook is None else self.codebook.shape[1] * LANES,
            "stages": None if self.codebook is None else self.codebook.shape[0],
            "nbytes": self.nbytes,
            "bits_per_weight": self.bits_per_weight,
        }

    def __rich__(self) -> str:
        return (
            f"{self.format} matrix {self.shape[0]}×{self.shape[1]}: "
            f"{self.bits_per_weight:.2f} bits a weight, {self.nbytes:,} bytes"
        )


def array_bytes(tree: PyTree) -> int:
    """Bytes of all arrays of a tree as they lie in memory."""
    leaves: list[Any] = jax.tree.leaves(tree)
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


def padded_rows(format: str, data: Any) -> int:
    """K of the matrix, padding included."""
    return data.shape[-2] * ROWS_PER_ELEMENT[format]


def check_format(name: str) -> None:
    """Raise unless `name` is a format.

    Raises:
        TPUKernelError: It is not; the message names those that are.
    """
    if name not in FORMATS:
        raise TPUKernelError(
            f"Weight format {name!r} is unknown; known are {', '.join(FORMATS)}."
            + did_you_mean(name, FORMATS)
        )
