"""`LowRank`: a frozen matrix and its two trained LoRA matrices."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...parallel.sharding.activations import constrain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """`base + a @ b` in place of a parameter (..., inputs, outputs).

    A layer that supports LoRA adds `(x @ a) @ b` to its output. Then neither the sum nor a gradient
    of its size ever exists, and small updates are not rounded away. Other layers read the sum by
    indexing, as they read an array.
    """

    base: jax.Array
    a: jax.Array
    b: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the base."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions of the base."""
        return self.base.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the base."""
        return self.base.dtype

    def __getitem__(self, index: Any) -> jax.Array:
        return self.merged()[index]

    def merged(self) -> jax.Array:
        """Return `base + a @ b` in the base's dtype, rounded once."""
        wide = jnp.promote_types(self.dtype, jnp.float32)
        added = jnp.matmul(
            self.a.astype(wide), self.b.astype(wide), precision=jax.lax.Precision.HIGHEST
        )
        return (self.base.astype(wide) + added).astype(self.dtype)

    def update(self, x: jax.Array) -> jax.Array:
        """Return `(x @ a) @ b` for x (..., inputs)."""
        # Sharded LoRA matrices are gathered, or the compiler would move activations instead.
        unsharded = (None,) * self.ndim
        a, b = (constrain(matrix.astype(x.dtype), *unsharded) for matrix in (self.a, self.b))
        return (x @ a) @ b
