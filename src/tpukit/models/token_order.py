"""The order of tokens in a step whose sequences are split over a ring of devices.

Under a causal mask the last device of a ring would work twice as much as the average, and the
others wait for it. In zigzag order all work alike, and a loss over tokens does not depend on it.
"""

import jax
import jax.numpy as jnp

from ..parallel.activations import constrain
from ..parallel.ring_layout import RingLayout, pieces_a_shard, to_zigzag, zigzag_order
from .loss import Batch
from .transformer_config import TransformerConfig


def ring_layout_for(
    config: TransformerConfig | None, *, shards: int, sequence_length: int | None
) -> RingLayout:
    """The order that suits a model; one's own model or loss may depend on the usual one.

    With a window little is seen of other devices, and a ring in the usual order ends early.
    """
    if config is None or config.sliding_window is not None or sequence_length is None:
        return "contiguous"
    even = sequence_length % (shards * pieces_a_shard("zigzag")) == 0
    return "zigzag" if shards > 1 and even else "contiguous"


def in_ring_order(batch: Batch, shards: int) -> dict[str, jax.Array]:
    """The batch with every sequence in zigzag order, and the places its tokens had."""
    tokens = batch["inputs"]
    examples, length = tokens.shape[:2]
    places = jnp.broadcast_to(jnp.asarray(zigzag_order(length, shards)), (examples, length))

    def ordered(x: jax.Array) -> jax.Array:
        is_sequence = x.ndim > 1 and x.shape[1] == length
        return constrain(to_zigzag(x, shards), "batch", "sequence") if is_sequence else x

    return {"positions": places, **{name: ordered(x) for name, x in batch.items()}}
