"""One matrix of a stored parameter, whatever format it is in."""

from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from ...kernels.ops.quantized_matmul.packing import dequantize
from ...kernels.ops.quantized_matmul.weight import QuantizedWeight


class QuantizedMatrix(Protocol):
    """A matrix (inputs, outputs) in a format of its own, a tree of arrays."""

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, outputs)."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        ...

    def dequantize(self, dtype: DTypeLike = ...) -> jax.Array:
        """The matrix it stands for."""
        ...

    def shardings(self, sharding: NamedSharding) -> Any:
        """The same of shardings, from that of the matrix; a stack's has its leading axis first."""
        ...

    def __rmatmul__(self, x: Any) -> jax.Array:
        """(…, inputs) -> (…, outputs)."""
        ...


# A matrix that is not quantized is an array.
Part: TypeAlias = QuantizedMatrix | QuantizedWeight | jax.Array


def part_matrix(part: Part, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The (inputs, outputs) array a part stands for."""
    if isinstance(part, QuantizedWeight):
        return dequantize(part, dtype)
    return part.astype(dtype) if isinstance(part, jax.Array) else part.dequantize(dtype)
