"""Choosing experts in plain jnp: a top-k, and a sort for the places in experts' queues."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .routing import queue_positions, sort_assignments


class Selection(NamedTuple):
    """What is chosen. Shapes: T tokens, E experts, k choices."""

    experts: jax.Array  # (T, k) int32, best first; of equals the lower number
    position: jax.Array  # (T, k) int32: how many earlier tokens chose the same expert
    counts: jax.Array  # (E,) int32: tokens that chose each expert


def select_reference(selection: jax.Array, *, k: int) -> Selection:
    """The k largest of each row of (T, E), and each choice's place in its expert's queue."""
    _, experts = jax.lax.top_k(selection, k)
    pairs = sort_assignments(experts, selection.shape[1])
    position = queue_positions(experts, pairs)
    return Selection(*(x.astype(jnp.int32) for x in (experts, position, pairs.counts)))
