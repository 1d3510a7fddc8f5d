"""Tables of vectors: rows, and bags of rows."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from .....errors import TPUModelError
from .....hardware.target import on_one_gpu
from .....kernels.ops.embedding_rows.api import embedding_rows
from .....parallel.sharding.activations import constrain


def lowerings() -> dict[Any, Any]:
    """Return what is lowered here: torch's function -> its counterpart on arrays."""
    import torch.nn.functional as functional

    return {functional.embedding: embedding, functional.embedding_bag: embedding_bag}


def embedding(
    input: jax.Array,
    weight: jax.Array,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    """Take rows of a table.

    Raises:
        TPUModelError: `max_norm` is asked for, which writes to the table.
    """
    del norm_type, sparse
    if max_norm is not None:
        raise TPUModelError(
            "an embedding with max_norm writes to its table in its forward, which a program "
            "cannot; normalise the rows that were taken instead."
        )
    # On a mesh the table is gathered for use, as every weight is, and activations stay in place.
    table = constrain(weight, "vocab", None)
    rows = embedding_rows(table, input) if on_one_gpu() else table[input]
    if scale_grad_by_freq:
        times = jnp.bincount(input.reshape(-1), length=weight.shape[0])[input]
        fixed = jax.lax.stop_gradient(rows)
        rows = fixed + (rows - fixed) / times[..., None]
    if padding_idx is not None:
        padding = (input == padding_idx % weight.shape[0])[..., None]
        rows = jnp.where(padding, jax.lax.stop_gradient(rows), rows)
    return rows


def embedding_bag(
    input: jax.Array,
    weight: jax.Array,
    offsets: jax.Array | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: Literal["sum", "mean", "max"] = "mean",
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> jax.Array:
    """Reduce the rows of each bag; bags are rows of `input`, or begin at `offsets`."""
    rows = embedding(
        input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    ).reshape(-1, weight.shape[1])
    if offsets is None:
        bags = input.shape[0]
        bag = jnp.repeat(jnp.arange(bags), input.shape[1])
    else:
        bags = offsets.shape[0] - include_last_offset
        places = jnp.arange(input.shape[0])
        bag = jnp.searchsorted(offsets[:bags], places, side="right") - 1
    counted = jnp.ones(input.size, bool)
    if padding_idx is not None:
        counted = input.reshape(-1) != padding_idx % weight.shape[0]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    if mode == "max":
        kept = jnp.where(counted[:, None], rows, -jnp.inf)
        largest = jax.ops.segment_max(kept, bag, bags)
        return jnp.where(jnp.isneginf(largest), 0, largest)
    total = jax.ops.segment_sum(jnp.where(counted[:, None], rows, 0), bag, bags)
    if mode == "sum":
        return total
    number = jax.ops.segment_sum(counted.astype(rows.dtype), bag, bags)
    return total / jnp.maximum(number, 1)[:, None]
