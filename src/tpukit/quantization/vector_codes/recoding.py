"""Codes chosen anew for a matrix that has moved: the nearest; entries and scales stay.

No input is looked at: who moved the matrix knew what its errors cost. With the feedback that first
codes are chosen by (see `feedback`), a small move would change codes far beyond it.
"""

from functools import partial

import jax
import jax.numpy as jnp

from .choice import CodeChoice, choice_for, choose_all, decode_rows
from .rotation import rotate
from .vq_array import VQArray


def recoded(array: VQArray, wanted: jax.Array) -> VQArray:
    """The array with the codes that make it nearest to `wanted`; nothing else of it changes.

    Args:
        array: One matrix.
        wanted: float32 (in, out).
    """
    return _recoded(array, wanted, choice_for(array.format))


@partial(jax.jit, static_argnames="choice")
def _recoded(array: VQArray, wanted: jax.Array, choice: CodeChoice) -> VQArray:
    with jax.default_matmul_precision("highest"):
        before = array.choices()
        (height, width), tables = array.shape, array.entries.astype(jnp.float32)
        tall, wide = before.shape[1] * tables.shape[2], before.shape[2]
        if array.signs is not None:
            wanted = rotate(wanted, array.signs)
        scales = jnp.where(array.scales == 0, 1, array.scales).astype(jnp.float32)
        rows = jnp.pad(wanted / scales, ((0, tall - height), (0, wide - width)))
        counts = (jnp.arange(tall) < height).astype(jnp.float32)
        squares = jnp.pad(scales**2, (0, wide - width))
        found = choose_all(rows, counts, squares, tables, choice=choice)

        def lost(codes: jax.Array) -> jax.Array:
            """(blocks, out), summed over what is chosen together."""
            errors = counts[:, None] * squares * (rows - decode_rows(codes, tables)) ** 2
            return jax.vmap(choice.shared)(errors.reshape(-1, tables.shape[2], wide).sum(1))

        # The search is not exhaustive, so what was chosen before may be the better.
        return array.with_choices(jnp.where(lost(found) < lost(before), found, before))
