"""What every matrix kernel does with its tiles: multiply them, and mask what lies past the end."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# True is the plain interpreter; the parameters are of the one that finds races.
Interpret: TypeAlias = bool | pltpu.InterpretParams


def tile_dot(a: jax.Array, b: jax.Array, *, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product of two tiles: integers in int32, floats in float32; float32 is not rounded.

    Args:
        a: A tile.
        b: The other.
        contract: The dimension of `a` and that of `b` that are summed over.
    """
    integers = jnp.issubdtype(a.dtype, jnp.integer)
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        preferred_element_type=jnp.int32 if integers else jnp.float32,
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
    )


def zero_past_end(tile: jax.Array, first: Any, end: int, *, axis: int) -> jax.Array:
    """Zero what lies past `end`: a last tile holds anything there, and 0 times it may be NaN.

    Args:
        tile: A tile of an array.
        first: Where the tile begins in the array.
        end: The array's size along `axis`.
        axis: Along which the tile may stick out.
    """
    if end % tile.shape[axis] == 0:
        return tile
    place = first + jax.lax.broadcasted_iota(jnp.int32, tile.shape, axis)
    return jnp.where(place < end, tile, jnp.zeros_like(tile))


def accumulate(total: Any, more: jax.Array, step: Any) -> None:
    """Begin the sum that `total` holds at step 0, and add to it at every later one."""

    @pl.when(step == 0)
    def _start() -> None:
        total[...] = more

    @pl.when(step > 0)
    def _add() -> None:
        total[...] += more
