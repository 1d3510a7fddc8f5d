"""`PublishedWeight`: what every quantized format of a matrix comes down to."""

from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ....errors import TPUModelError

EXACT_DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))


@dataclass(frozen=True)
class PublishedWeight:
    """Values of an (out, in) matrix, or of several, that share scales by blocks.

    What it stands for is `(values - zeros) * scales`, every scale and zero spread over its block.

    Attributes:
        values: (..., out, in), as integers, float8, or the numbers that codes stand for.
        scales: (..., block rows, block columns), one for each block.
        block: Rows and columns of values that share a scale; the last block may be cut off.
        zeros: Like the scales, or None.
        groups: For each input which column of scales is its own, where that is not its block's.
        transposed: Whether the model has the matrix as (in, out), as GPT-OSS has its experts.
    """

    values: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]
    zeros: np.ndarray | None = None
    groups: np.ndarray | None = None
    transposed: bool = False

    def __post_init__(self) -> None:
        if not self.values.size or not self.scales.size:
            raise TPUModelError(
                f"values are {self.values.shape} and scales {self.scales.shape}; there is nothing "
                "in them."
            )
        *before, rows, columns = self.values.shape
        grid = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        if self.groups is not None:
            grid = (grid[0], self.scales.shape[-1])
            if self.groups.shape != (columns,) or not _within(self.groups, grid[1]):
                raise TPUModelError(
                    f"the groups of inputs are {self.groups.shape} numbers up to "
                    f"{int(self.groups.max(initial=0))}, for {columns} inputs in {grid[1]} groups."
                )
        expected = (*before, *grid)
        for name, found in (("scales", self.scales), ("zero points", self.zeros)):
            if found is not None and found.shape != expected:
                raise TPUModelError(
                    f"{name} are {found.shape}; values of {self.values.shape} in blocks of "
                    f"{self.block[0]}×{self.block[1]} have {expected}."
                )
        if not np.isfinite(self.scales.astype(np.float32)).all():
            raise TPUModelError("scales are not all finite numbers; the file is damaged.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix, as the model has it."""
        *before, rows, columns = self.values.shape
        return (*before, columns, rows) if self.transposed else (*before, rows, columns)

    @cached_property
    def signed(self) -> np.ndarray:
        """Integer values less their zero points; other values as they are."""
        if self.zeros is None:
            return self.values
        return self.values.astype(np.int16) - self.spread(self.zeros.astype(np.int16))

    @cached_property
    def exact(self) -> np.dtype | None:
        """The narrowest of bfloat16 and float32 that holds every number; None if neither does."""
        wide = self._wide()
        held = (dtype for dtype in EXACT_DTYPES if (wide.astype(dtype) == wide).all())
        return next(held, None)

    def dequantize(self, dtype: DTypeLike = ml_dtypes.bfloat16) -> np.ndarray:
        """The matrix, rounded once, from the exact products."""
        found = self._wide().astype(dtype)
        return np.swapaxes(found, -1, -2) if self.transposed else found

    def spread(self, of_blocks: np.ndarray) -> np.ndarray:
        """A number for every value, out of one for every block."""
        rows, columns = self.values.shape[-2:]
        tall = np.repeat(of_blocks, self.block[0], axis=-2)[..., :rows, :]
        if self.groups is not None:
            return tall[..., self.groups]
        return np.repeat(tall, self.block[1], axis=-1)[..., :columns]

    def _wide(self) -> np.ndarray:
        # 53 bits hold every product of a narrow value with a float32 scale.
        return self.signed.astype(np.float64) * self.spread(self.scales.astype(np.float64))


def _within(numbers: np.ndarray, end: int) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())
