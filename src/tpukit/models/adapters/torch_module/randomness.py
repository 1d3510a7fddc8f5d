"""The key that random operations of the module being traced draw from."""

import jax

from .environment import environment


def next_key() -> jax.Array:
    """Return a key of its own for one random operation."""
    return environment().get_and_rotate_prng_key()
