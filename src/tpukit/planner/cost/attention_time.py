"""How long attention takes by arithmetic: as a kernel that visits blocks, or score by score."""

import math
from typing import Any

import numpy as np

from .model_shape import ModelShape
from .rates import Rates

# The largest block of the attention kernel: what is above the diagonal inside a block is computed.
ATTENTION_BLOCK = 2048
# Products of the forward kernel, of the fused backward kernel (scores again, then four), and of two
# backward kernels, one for queries and one for keys: both make scores and their gradients.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS, IN_TWO_PRODUCTS = 2, 5, 7
# Without a kernel the backward pass has the scores, and four products with them.
PLAIN_BACKWARD_PRODUCTS = 4

Numbers = Any  # a number or an array of them


def visited_keys(length: int, window: int | None) -> float:
    """Keys that a query meets in the blocks its kernel visits, in the mean over a sequence."""
    block = math.gcd(length, ATTENTION_BLOCK)
    rows = length // block
    back = rows if window is None else math.ceil((window - 1) / block)
    return block * sum(min(row, back) + 1 for row in range(rows)) / rows


def attended_keys(length: int, window: int | None) -> float:
    """Keys that a query attends to, itself among them, in the mean over a sequence."""
    reach = min(length, window or length)
    return reach - reach * (reach - 1) / (2 * length)


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
    backward = BACKWARD_PRODUCTS * product / reached / rates.backward_over_forward
    least = _least_s(shape, rates, 1.0, length=length, token_share=token_share)
    return np.maximum(forward, least[0]), np.maximum(backward, least[1])


def _least_s(
    shape: ModelShape, rates: Rates, share_of_peak: Numbers, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """Seconds of forward and backward at a share of the peak, without a score that is masked."""
    local = shape.layers - shape.global_layers
    keys = shape.global_layers * attended_keys(length, None)
    keys += local * attended_keys(length, shape.window)
    product = 2 * keys * shape.heads * shape.head_dim * token_share
    seconds = product / (rates.bf16_flops_per_s * share_of_peak)
    return FORWARD_PRODUCTS * seconds, BACKWARD_PRODUCTS * seconds


def splash_in_two_s(
    shape: ModelShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """The same with a backward kernel each for queries and for keys."""
    forward, backward = splash_s(shape, rates, length=length, token_share=token_share)
    return forward, backward * IN_TWO_PRODUCTS / BACKWARD_PRODUCTS


def kernel_s(
    shape: ModelShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """The attention of our kernels.

    How they compare was found with heads of 128. Where splash comes near the peak, ours are not
    credited with more than other products reach.
    """
    forward, backward = splash_s(shape, rates, length=length, token_share=token_share)
    least = _least_s(shape, rates, rates.matrix_share, length=length, token_share=token_share)
    return (
        np.maximum(forward * rates.step.ours_over_splash_forward, least[0]),
        np.maximum(backward * rates.step.ours_over_splash_backward, least[1]),
    )


def joined_s(
    shape: ModelShape, rates: Rates, *, hops: Numbers, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """What a ring of so many hops adds to our kernels, forward and backward.

    Layers with a window need no ring, only the end of the piece before.
    """
    numbers = hops * shape.global_layers * shape.heads * shape.head_dim * token_share
    each = numbers / rates.hbm_bytes_per_s
    return rates.step.ring_forward_bytes * each, rates.step.ring_backward_bytes * each


def plain_s(
    shape: ModelShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """The same where there is no kernel: every score goes through HBM, masked or not."""
    scores = shape.layers * length * shape.heads * token_share
    product = 2 * scores * shape.head_dim / (rates.bf16_flops_per_s * rates.matrix_share)
    score_byte = scores / rates.hbm_bytes_per_s
    forward = FORWARD_PRODUCTS * product + rates.step.plain_forward_bytes * score_byte
    backward = PLAIN_BACKWARD_PRODUCTS * product + rates.step.plain_backward_bytes * score_byte
    return forward, backward
