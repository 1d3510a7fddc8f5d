"""Random batches of given shapes, to compile, time and try a step with."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp


def random_batch(
    shapes: Mapping[str, jax.ShapeDtypeStruct], *, below: int, seed: int
) -> dict[str, jax.Array]:
    """Whole numbers from 0 to `below`, others normally distributed."""
    batch: dict[str, jax.Array] = {}
    for index, (name, shape) in enumerate(shapes.items()):
        rng = jax.random.fold_in(jax.random.key(seed), index)
        whole = jnp.issubdtype(shape.dtype, jnp.integer)
        batch[name] = (
            jax.random.randint(rng, shape.shape, 0, below, shape.dtype)
            if whole
            else jax.random.normal(rng, shape.shape, shape.dtype)
        )
    return batch
