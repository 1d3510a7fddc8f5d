"""How long attention takes by arithmetic: as a kernel that visits blocks, or score by score."""

import math
from typing import Any

from .model_shape import ModelShape
from .rates import Rates

# The largest block of the attention kernel: what is above the diagonal inside a block is computed.
ATTENTION_BLOCK = 2048
# Products of the forward kernel, of the fused backward kernel (scores again, then four), and of two
# backward kernels, one for queries and one for keys: both make scores and their gradients.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS, IN_TWO_PRODUCTS = 2, 5, 7
# Our kernels' time over splash's, forward and backward: what the timeline says of compiled steps of
# llama3.1-8b with sequences of 8192, .74 and .67 on v6e, .77 and .71 on v5p.
OURS_OVER_SPLASH = (0.75, 0.69)
# Without a kernel the backward pass has the scores, and four products with them.
PLAIN_BACKWARD_PRODUCTS = 4
# HBM bytes for each score without a kernel, beside the products, of measured XLA ops with 1024 or
# more keys (benchmarks/data/kernel_timings.json.gz): forward 9 to 14 on v5p, v6e and TPU7x,
# backward 35 to 39 on TPU7x, where it makes the scores anew.
PLAIN_FORWARD_BYTES, PLAIN_BACKWARD_BYTES = 12, 25
# HBM bytes for each number of a device's queries in every hop of a ring: results joined, gradients
# added, pieces chosen. Of a compiled step of llama3.1-8b with 65536 tokens on v6e-8, where 36 % of
# the ring's transfers is waited for.
RING_FORWARD_BYTES, RING_BACKWARD_BYTES = 24, 37
RING_WAITED = 0.36

Numbers = Any  # a number or an array of them


def visited_keys(length: int, window: int | None) -> float:
    """Keys that a query meets in the blocks its kernel visits, in the mean over a sequence."""
    block = math.gcd(length, ATTENTION_BLOCK)
    rows = length // block
    back = rows if window is None else math.ceil((window - 1) / block)
    return block * sum(min(row, back) + 1 for row in range(rows)) / rows


def splash_s(
    shape: ModelShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """Seconds of jax's forward and backward kernel, over all layers.

    Args:
        shape: The model.
        rates: Of one device.
        length: Tokens in an example.
        token_share: Tokens of a device over the ways its heads and layers are split.
    """
    local = shape.layers - shape.global_layers
    keys = shape.global_layers * visited_keys(length, None)
    keys += local * visited_keys(length, shape.window) if local else 0.0
    product = 2 * keys * shape.heads * shape.head_dim * token_share
    reached = rates.bf16_flops_per_s * rates.attention_share / rates.op_time_in_a_step
    forward = FORWARD_PRODUCTS * product / reached
    return forward, BACKWARD_PRODUCTS * product / reached / rates.backward_over_forward


def splash_in_two_s(
    shape: ModelShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """The same with a backward kernel each for queries and for keys."""
    forward, backward = splash_s(shape, rates, length=length, token_share=token_share)
    return forward, backward * IN_TWO_PRODUCTS / BACKWARD_PRODUCTS


def kernel_s(
    shape: ModelShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """The same of our kernels."""
    theirs = splash_s(shape, rates, length=length, token_share=token_share)
    forward, backward = (ratio * s for ratio, s in zip(OURS_OVER_SPLASH, theirs, strict=True))
    return forward, backward


def joined_s(
    shape: ModelShape, rates: Rates, *, hops: Numbers, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """What a ring of so many hops adds to our kernels, forward and backward.

    Layers with a window need no ring, only the end of the piece before.
    """
    numbers = hops * shape.global_layers * shape.heads * shape.head_dim * token_share
    each = numbers / rates.hbm_bytes_per_s
    return RING_FORWARD_BYTES * each, RING_BACKWARD_BYTES * each


def plain_s(
    shape: ModelShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """The same where there is no kernel: every score goes through HBM, masked or not."""
    scores = shape.layers * length * shape.heads * token_share
    product = 2 * scores * shape.head_dim / (rates.bf16_flops_per_s * rates.matrix_share)
    score_byte = scores / rates.hbm_bytes_per_s
    forward = FORWARD_PRODUCTS * product + PLAIN_FORWARD_BYTES * score_byte
    return forward, PLAIN_BACKWARD_PRODUCTS * product + PLAIN_BACKWARD_BYTES * score_byte
