"""The order of tokens in a step whose sequences are split over a ring of devices.

Under a causal mask the last device of a ring would work twice as much as the average, and the
others wait for it. In zigzag order all work alike, and a loss over tokens does not depend on it.
"""

import jax
import jax.numpy as jnp

from ..models.loss.loss import Batch
from ..models.transformer.config import TransformerConfig
from ..parallel.ring.order import RingLayout, pieces_a_shard, to_zigzag, zigzag_order
from ..parallel.ring.window import reaches_one_piece
from ..parallel.sharding.activations import constrain


def ring_layout_for(
    config: TransformerConfig | None, *, shards: int, sequence_length: int | None
) -> RingLayout:
    """The order that suits a model; one's own model or loss may depend on the usual one."""
    if config is None or sequence_length is None or shards == 1:
        return "contiguous"
    piece, rest = divmod(sequence_length, shards * pieces_a_shard("zigzag"))
    # Pieces of zigzag are half as long, and a kernel's window reaches into one of them only.
    far = config.sliding_window is not None and not reaches_one_piece(config.sliding_window, piece)
    return "contiguous" if rest or far else "zigzag"


def in_ring_order(batch: Batch, shards: int) -> Batch:
    """The batch with every sequence in zigzag order, and the positions its tokens had."""
    if shards == 1:
        return batch
    tokens = batch["inputs"]
    examples, length = tokens.shape[:2]
    positions = jnp.broadcast_to(jnp.asarray(zigzag_order(length, shards)), (examples, length))

    def ordered(x: jax.Array) -> jax.Array:
        is_sequence = x.ndim > 1 and x.shape[1] == length
        return constrain(to_zigzag(x, shards), "batch", "sequence") if is_sequence else x

    return {"positions": positions, **{name: ordered(x) for name, x in batch.items()}}
