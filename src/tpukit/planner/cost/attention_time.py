"""How long attention takes by arithmetic: as a kernel that visits blocks, or score by score."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .layer_shape import DELTA_CHUNK, LayerShape
from .rates import Rates

# The largest block of the attention kernel: what is above the diagonal inside a block is computed.
ATTENTION_BLOCK = 2048
# Products of the forward kernel, of the fused backward kernel (scores again, then four), and of two
# backward kernels, one for queries and one for keys: both make scores and their gradients. First of
# those as wide as a head of queries, then of values.
FORWARD, BACKWARD, IN_TWO = (1, 1), (3, 2), (4, 3)
# Without a kernel the backward pass has the scores, and four products with them.
PLAIN_BACKWARD = (2, 2)

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


def _seen(layer: LayerShape, length: int, keys: Callable[[int, int | None], float]) -> float:
    """Keys of a query of a layer, in a chunk as in a sequence of its own."""
    return keys(min(length, layer.chunk or length), layer.window)


def _flops(layer: LayerShape, products: tuple[int, int], scores: Numbers) -> Numbers:
    """FLOPs of so many products with scores of every head."""
    as_queries, as_values = products
    width = as_queries * layer.qk_dim + as_values * layer.v_dim
    return 2 * layer.heads * width * scores


def splash_s(
    layer: LayerShape,
    rates: Rates,
    *,
    length: int,
    token_share: Numbers,
    backward_products: tuple[int, int] = BACKWARD,
) -> tuple[Numbers, Numbers]:
    """Seconds of jax's forward and backward kernel, over all layers of a kind.

    Args:
        layer: The kind.
        rates: Of one device.
        length: Tokens in an example.
        token_share: Tokens of a device over the ways its heads and layers are split.
        backward_products: Of the backward kernel, or of both.
    """
    if layer.linear:
        return linear_s(layer, rates, token_share=token_share)
    scores = layer.count * _seen(layer, length, visited_keys) * token_share
    share = rates.attention_share[layer.head_dim]
    reached = rates.bf16_flops_per_s * share / rates.op_time_in_a_step
    forward = _flops(layer, FORWARD, scores) / reached
    backward = _flops(layer, backward_products, scores) / reached / rates.backward_over_forward
    least = _least_s(layer, rates, 1.0, length=length, token_share=token_share)
    return np.maximum(forward, least[0]), np.maximum(backward, least[1])


def _least_s(
    layer: LayerShape, rates: Rates, share_of_peak: Numbers, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """Seconds of forward and backward at a share of the peak, without a score that is masked."""
    scores = layer.count * _seen(layer, length, attended_keys) * token_share
    reached = rates.bf16_flops_per_s * share_of_peak
    forward, backward = (_flops(layer, products, scores) for products in (FORWARD, BACKWARD))
    return forward / reached, backward / reached


def splash_in_two_s(
    layer: LayerShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """The same with a backward kernel each for queries and for keys."""
    return splash_s(layer, rates, length=length, token_share=token_share, backward_products=IN_TWO)


def kernel_s(
    layer: LayerShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """The attention of our kernels.

    How they compare was found with heads of 128. Where splash comes near the peak, ours are not
    credited with more than other products reach.
    """
    if layer.linear:
        return linear_s(layer, rates, token_share=token_share)
    forward, backward = splash_s(layer, rates, length=length, token_share=token_share)
    least = _least_s(layer, rates, rates.matrix_share, length=length, token_share=token_share)
    return (
        np.maximum(forward * rates.step.ours_over_splash_forward, least[0]),
        np.maximum(backward * rates.step.ours_over_splash_backward, least[1]),
    )


def joined_s(
    layer: LayerShape, rates: Rates, *, hops: Numbers, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """What a ring of so many hops adds to our kernels, forward and backward.

    Layers with a window need no ring, only the end of the piece before.
    """
    numbers = 0 if layer.is_local else hops * layer.count * layer.out_width * token_share
    each = numbers / rates.hbm_bytes_per_s
    return rates.step.ring_forward_bytes * each, rates.step.ring_backward_bytes * each


def plain_s(
    layer: LayerShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """The same where there is no kernel: every score goes through HBM, masked or not."""
    if layer.linear:
        return linear_s(layer, rates, token_share=token_share)
    scores = layer.count * min(length, layer.chunk or length) * token_share
    reached = rates.bf16_flops_per_s * rates.matrix_share
    forward, backward = (
        _flops(layer, products, scores) / reached for products in (FORWARD, PLAIN_BACKWARD)
    )
    score_byte = scores * layer.heads / rates.hbm_bytes_per_s
    forward = forward + rates.step.plain_forward_bytes * score_byte
    backward = backward + rates.step.plain_backward_bytes * score_byte
    return forward, backward


def linear_s(layer: LayerShape, rates: Rates, *, token_share: Numbers) -> tuple[Numbers, Numbers]:
    """Seconds of linear attention in chunks, forward and backward.

    Forward each token of a chunk meets every other in the products of keys with keys and with
    queries, in the inverse that corrects values and keys, and in what they give; and the state
    three times. Gradients take twice as much, and the forward pass again.
    """
    within = 3 * layer.qk_dim + 2 * layer.v_dim
    each = DELTA_CHUNK * within + 3 * layer.qk_dim * layer.v_dim
    flops = 2 * layer.heads * each * layer.count * token_share
    # Products of a chunk are as wide as a head: they fill the matrix unit as attention's do.
    share = rates.attention_share[layer.head_dim]
    forward = flops * rates.op_time_in_a_step / (rates.bf16_flops_per_s * share)
    return forward, 3 * forward
