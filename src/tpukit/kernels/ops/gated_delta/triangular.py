"""The inverse of I + A for strictly lower triangular A, in products that a matrix unit likes."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ...registry.gradient import with_backward

Product = Callable[[jax.Array, jax.Array], jax.Array]


def unit_lower_inverse(a: jax.Array, operands: DTypeLike | None = None) -> jax.Array:
    """(I + A)⁻¹ of the strictly lower part A of each (…, C, C), C a power of two.

    Products are of `operands` (by default of what A is) with sums in the dtype of A. In bfloat16
    they add 0.2 to 8 % to the error that its values, keys and states make anyway.

    Inverses of the diagonal blocks of size b give those of size 2b: with L the blocks left of the
    diagonal inside 2b, T becomes T - T L T. That is substitution by blocks. The product of powers
    (I - A)(I + A²)(I + A⁴)… takes as many products, but repeated keys make its powers grow as
    binomial coefficients, up to 10¹⁸ for 64 of them, and nothing is left of float32.
    """
    product = partial(_product, operands=operands or a.dtype)
    return with_backward(partial(_forward, product), partial(_backward, product), a)


def merging_mask(size: int, block: int) -> np.ndarray:
    """True in the lower left quarter of each diagonal block of twice `block`."""
    row, column = np.arange(size)[:, None], np.arange(size)[None, :]
    is_left = (row // block) % 2 == 1
    return is_left & (column // block == row // block - 1)


def _forward(product: Product, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    size = a.shape[-1]
    # Blocks of one are their own inverses, so that the first merge takes no product.
    inverse = jnp.eye(size, dtype=a.dtype) - jnp.where(merging_mask(size, 1), a, 0)
    block = 2
    while block < size:
        left = jnp.where(merging_mask(size, block), a, 0)
        inverse = inverse - product(product(inverse, left), inverse)
        block *= 2
    return inverse, inverse


def _backward(product: Product, inverse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    """d(T) = -T dA T, of which only the strictly lower part is an argument."""
    transposed = jnp.swapaxes(inverse, -1, -2)
    gradient = -product(product(transposed, cotangent), transposed)
    return (jnp.tril(gradient, -1),)


def _product(a: jax.Array, b: jax.Array, *, operands: DTypeLike) -> jax.Array:
    return jnp.matmul(
        a.astype(operands),
        b.astype(operands),
        precision=None if operands == jnp.bfloat16 else jax.lax.Precision.HIGHEST,
        preferred_element_type=a.dtype,
    )
