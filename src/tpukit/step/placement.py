"""How a strategy on a mesh changes attention, experts, batches and token order."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..annotations import AnyMesh
from ..errors import ShardingError
from ..models.attention.choice import automatic_attention
from ..models.attention.tpu_kernels import (
    flash_attention,
    splash_attention,
    splash_attention_in_two,
)
from ..models.execution import Execution, experts_on, kernel_spread
from ..models.loss import Batch
from ..models.transformer.config import TransformerConfig
from ..parallel.mesh.mesh import axis_sizes
from ..parallel.ring.attention import ring_attention
from ..parallel.ring.linear_attention import context_gated_delta, context_short_convolution
from ..parallel.ring.order import RingLayout, pieces_a_shard, to_zigzag, zigzag_order
from ..parallel.ring.window import reaches_one_piece
from ..parallel.sharding.activations import constrain
from ..parallel.sharding.layout import Layout
from ..parallel.sharding.strategy import find_axis

# Attention that runs on each device's shard, so it needs the mesh axes of its arrays.
_BY_KERNEL: dict[str, Callable[..., Any]] = {
    "auto": automatic_attention,
    "flash": flash_attention,
    "splash": splash_attention,
    "splash in two": splash_attention_in_two,
}


def execution_on(
    mesh: AnyMesh,
    strategy: str,
    execution: Execution,
    *,
    config: TransformerConfig | None,
    sequence_length: int | None,
) -> Execution:
    """Return the execution with attention and experts placed on the mesh.

    Args:
        mesh: The mesh of the step.
        strategy: The sharding strategy.
        execution: The settings without a mesh.
        config: The reference transformer, or None for a user model.
        sequence_length: Tokens per example, or None where the loss depends on token order.
    """
    context = find_axis(mesh, strategy, "context")
    spread = kernel_spread(mesh, strategy)
    if context is not None and execution.attention in ("auto", "ring"):
        shards = axis_sizes(mesh)[context]
        layout = ring_layout_for(config, shards=shards, sequence_length=sequence_length)
        execution = execution.replace(
            attention=partial(ring_attention, axis=context, layout=layout, **spread),
            zigzag=shards if layout == "zigzag" else 1,
            delta=partial(context_gated_delta, axis=context, layout=layout, **spread),
            convolution=partial(
                context_short_convolution,
                axis=context,
                layout=layout,
                mesh=mesh,
                batch_axes=spread["batch_axes"],
                channel_axes=spread["head_axes"],
            ),
        )
    elif isinstance(execution.attention, str) and execution.attention in _BY_KERNEL:
        kernel = _BY_KERNEL[execution.attention]
        execution = execution.replace(attention=partial(kernel, **spread))
    if config is not None and config.has_experts:
        execution = experts_on(mesh, strategy, execution, context=context)
    return execution


def batch_shardings(
    layout: Layout,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    sequence_length: int | None,
    microbatches: int,
) -> dict[str, NamedSharding]:
    """Shard examples over the batch axes and, with context parallelism, sequences too.

    Raises:
        ShardingError: The batch or the sequence does not divide evenly.
    """
    named: list[tuple[str, ...]] = [_names(entry) for entry in layout.batch_spec]
    batch_axes, sequence_axes = (*named, (), ())[:2]
    sizes = axis_sizes(layout.mesh)
    shardings: dict[str, NamedSharding] = {}
    for name, shape in shapes.items():
        is_sequence = shape.ndim > 1 and shape.shape[1] == sequence_length
        entries = (batch_axes, sequence_axes if is_sequence else ())[: shape.ndim]
        ways = [math.prod(sizes[axis] for axis in axes) for axes in entries]
        if shape.shape[0] // microbatches % ways[0]:
            pieces = f" in {microbatches} micro-batches" if microbatches > 1 else ""
            raise ShardingError(
                f"batch_size={shape.shape[0]}{pieces} cannot be split over "
                f"{' x '.join(batch_axes)} = {ways[0]} devices; "
                f"use a multiple of {ways[0] * microbatches}."
            )
        if is_sequence and shape.shape[1] % ways[1]:
            raise ShardingError(
                f"sequence_length={shape.shape[1]} cannot be split over "
                f"{' x '.join(sequence_axes)} = {ways[1]} devices; use a multiple of {ways[1]}."
            )
        shardings[name] = NamedSharding(
            layout.mesh, PartitionSpec(*(axes or None for axes in entries))
        )
    return shardings


def _names(entry: object) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)  # pyright: ignore[reportArgumentType]  a spec entry is a name or names


def ring_layout_for(
    config: TransformerConfig | None, *, shards: int, sequence_length: int | None
) -> RingLayout:
    """Return the token order for ring attention; user models and losses keep the usual order."""
    if config is None or sequence_length is None or shards == 1:
        return "contiguous"
    piece, rest = divmod(sequence_length, shards * pieces_a_shard("zigzag"))
    # Zigzag pieces are half as long, and a kernel's window may reach into one other piece only.
    windows = {layer.sliding_window for layer in config.kinds.values() if layer.sliding_window}
    far = any(not reaches_one_piece(window, piece) for window in windows)
    return "contiguous" if rest or far else "zigzag"


def in_ring_order(batch: Batch, shards: int) -> Batch:
    """Return the batch with sequences in zigzag order, and the positions of the tokens.

    Under a causal mask the last device of a ring would do twice the average work while the others
    wait. Zigzag order balances the work, and a sum over tokens does not depend on the order.
    """
    if shards == 1:
        return batch
    tokens = batch["inputs"]
    examples, length = tokens.shape[:2]
    positions = jnp.broadcast_to(jnp.asarray(zigzag_order(length, shards)), (examples, length))

    def ordered(x: jax.Array) -> jax.Array:
        is_sequence = x.ndim > 1 and x.shape[1] == length
        return constrain(to_zigzag(x, shards), "batch", "sequence") if is_sequence else x

    return {"positions": positions, **{name: ordered(x) for name, x in batch.items()}}
