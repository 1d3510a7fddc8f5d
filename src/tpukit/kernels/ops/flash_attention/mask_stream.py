"""How the kernels read a boolean for every score: block by block, beside queries and keys."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .problem import pad_tokens
from .visibility import Position

# From a step of the grid to its example, head, block of queries and block of keys.
Step = Callable[..., tuple[Position, Position, Position, Position]]


def stream_mask(
    mask: jax.Array,
    step: Step,
    *,
    tokens: tuple[int, int],
    block: tuple[int, int],
    by_keys: bool = False,
) -> tuple[jax.Array, pl.BlockSpec]:
    """The mask as a kernel's argument, and the block of it that a step of the grid reads.

    Args:
        mask: Booleans (B or 1, H or 1, queries or 1, keys).
        step: What a step of the grid is about.
        tokens: Queries and keys to pad it to, with False.
        block: Queries and keys of a step.
        by_keys: Whether the kernel's scores are (keys, queries).

    Returns:
        A byte for each score, in the order of the kernel's scores. Where all queries share a row,
        that row in words: it is spread over queries inside the kernel.
    """
    each_example, each_head, each_query = (size > 1 for size in mask.shape[:3])
    transposed = by_keys and each_query
    mask = pad_tokens(mask, tokens[1], axis=3)
    if each_query:
        mask = pad_tokens(mask, tokens[0], axis=2)
    mask = mask.swapaxes(2, 3) if transposed else mask

    def index(*grid: Position) -> tuple[Position, ...]:
        example, head, queries, keys = step(*grid)
        across = (queries if each_query else 0, keys)
        outer = (example if each_example else 0, head if each_head else 0)
        return (*outer, *(across[::-1] if transposed else across))

    shape = (block[0] if each_query else 1, block[1])
    spec = pl.BlockSpec((None, None, *(shape[::-1] if transposed else shape)), index)
    return mask.astype(jnp.int8 if each_query else jnp.int32), spec
