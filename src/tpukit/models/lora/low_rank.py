"""`LowRank`: a matrix that stays as it is and two thin ones that are trained beside it."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...parallel.sharding.activations import constrain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """`base + a @ b`, in the place of a parameter (..., inputs, outputs).

    A layer that knows it adds `(x @ a) @ b` to its product, so that neither the sum nor a gradient
    of its size ever exists, and what is small beside the base is not rounded away. Any other reads
    the sum by indexing, as it reads an array.
    """

    base: jax.Array
    a: jax.Array
    b: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """Of the matrix."""
        return self.base.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """Of the base."""
        return self.base.dtype

    def __getitem__(self, index: Any) -> jax.Array:
        return self.merged()[index]

    def merged(self) -> jax.Array:
        """The sum, in the base's format, rounded once."""
        wide = jnp.promote_types(self.dtype, jnp.float32)
        added = jnp.matmul(
            self.a.astype(wide), self.b.astype(wide), precision=jax.lax.Precision.HIGHEST
        )
        return (self.base.astype(wide) + added).astype(self.dtype)

    def beside(self, x: jax.Array) -> jax.Array:
        """What the thin matrices make of x (..., inputs)."""
        # Gathered where they are cut: else the compiler moves activations, which are larger.
        whole = (None,) * self.ndim
        a, b = (constrain(one.astype(x.dtype), *whole) for one in (self.a, self.b))
        return (x @ a) @ b
