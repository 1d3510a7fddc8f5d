"""What is quantized, cut into vectors and checked."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ...errors import TPUValidationError
from ..formats import MOST_ENTRIES


def check_sizes(**sizes: object) -> None:
    """Raise unless every size is a whole number of at least one, and entries can be numbered.

    Raises:
        TPUValidationError: One is not.
    """
    for name, seen in sizes.items():
        least, most = (2, MOST_ENTRIES) if name == "entries" else (1, 2**40)
        if isinstance(seen, bool) or not isinstance(seen, int) or not least <= seen <= most:
            raise TPUValidationError(
                f"{name}={seen!r}; expected a whole number from {least} to {most}."
            )


def cut_vectors(data: ArrayLike, length: int, entries: int) -> jax.Array:
    """float32 (n, length) of data.

    Raises:
        TPUValidationError: It cannot be cut so, is not finite, or has fewer vectors than entries.
    """
    values = jnp.asarray(data, jnp.float32)
    if values.size % length or (values.ndim == 2 and values.shape[1] % length):
        raise TPUValidationError(
            f"Data of shape {values.shape} cannot be cut into vectors of {length}; choose a length "
            "that divides its last axis, or pad it."
        )
    vectors = values.reshape(-1, length)
    if vectors.shape[0] < entries:
        raise TPUValidationError(
            f"{vectors.shape[0]} vectors of {length} values cannot fit {entries} entries; give "
            f"more data, or at most entries={vectors.shape[0]}."
        )
    if not bool(_all_finite(vectors)):
        raise TPUValidationError("Data holds values that are not finite; leave them out.")
    return vectors


def cut_weights(weights: ArrayLike, vectors: jax.Array) -> jax.Array:
    """float32 (n, 1) or (n, length) of weights of vectors.

    Raises:
        TPUValidationError: They have another shape, are negative, or all zero.
    """
    each = jnp.asarray(weights, jnp.float32)
    if each.shape not in ((vectors.shape[0],), (vectors.shape[0], 1), vectors.shape):
        raise TPUValidationError(
            f"weights are {each.shape}; expected {(vectors.shape[0],)} of vectors or "
            f"{vectors.shape} of values."
        )
    if not bool(_all_finite(each) & _all_counted(each)):
        raise TPUValidationError("weights must be finite, not negative, and not all zero.")
    return each.reshape(vectors.shape[0], -1)


@jax.jit
def _all_finite(values: jax.Array) -> jax.Array:
    return jnp.isfinite(values).all()


@jax.jit
def _all_counted(weights: jax.Array) -> jax.Array:
    return (weights >= 0).all() & (weights > 0).any()
