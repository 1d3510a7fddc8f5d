"""Time of attention by arithmetic: with a kernel over blocks, or with scores in HBM."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .model_shape import DELTA_CHUNK, LayerShape
from .rates import Rates

# Largest block of the attention kernel; masked scores inside a block are computed too.
ATTENTION_BLOCK = 2048
# Matmuls of the forward kernel, of the fused backward kernel (scores again, then four), and of two
# separate backward kernels, for queries and for keys, which both compute scores and their
# gradients. The first number counts matmuls as wide as a query head, the second as a value head.
FORWARD, BACKWARD, IN_TWO = (1, 1), (3, 2), (4, 3)
# Without a kernel the backward pass has the scores already, and four matmuls with them.
PLAIN_BACKWARD = (2, 2)

Numbers = Any  # a number or an array of them


def visited_keys(length: int, window: int | None) -> float:
    """Return the mean number of keys per query in the blocks that the kernel visits."""
    block = math.gcd(length, ATTENTION_BLOCK)
    rows = length // block
    back = rows if window is None else math.ceil((window - 1) / block)
    return block * sum(min(row, back) + 1 for row in range(rows)) / rows


def attended_keys(length: int, window: int | None) -> float:
    """Return the mean number of keys that a query attends to, itself included."""
    reach = min(length, window or length)
    return reach - reach * (reach - 1) / (2 * length)


def _seen(layer: LayerShape, length: int, keys: Callable[[int, int | None], float]) -> float:
    """Return the keys per query of a layer; a chunk counts as its own sequence."""
    return keys(min(length, layer.chunk or length), layer.window)


def _flops(layer: LayerShape, products: tuple[int, int], scores: Numbers) -> Numbers:
    """Return the FLOPs of this many matmuls with scores of every head."""
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
    """Return the seconds of jax's forward and backward splash kernels, over all layers of a kind.

    Args:
        layer: The kind of layer.
        rates: Rates of one device.
        length: Tokens in an example.
        token_share: Tokens per device divided by the ways that heads and layers are split.
        backward_products: Matmuls of the backward kernel, or of both.
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
    """Return the seconds of forward and backward at a share of peak, without masked scores."""
    scores = layer.count * _seen(layer, length, attended_keys) * token_share
    reached = rates.bf16_flops_per_s * share_of_peak
    forward, backward = (_flops(layer, products, scores) for products in (FORWARD, BACKWARD))
    return forward / reached, backward / reached


def splash_in_two_s(
    layer: LayerShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """Return the seconds of splash kernels with separate backward kernels."""
    return splash_s(layer, rates, length=length, token_share=token_share, backward_products=IN_TWO)


def kernel_s(
    layer: LayerShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """Return the seconds of tpukit's attention kernels.

    Their ratio to splash was measured with heads of 128. They are not assumed to be faster than
    other matmuls where splash is near the peak.
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
    """Return the seconds that a ring of `hops` hops adds to tpukit's kernels.

    Layers with a window need no ring, only the end of the previous shard.
    """
    numbers = 0 if layer.is_local else hops * layer.count * layer.out_width * token_share
    each = numbers / rates.hbm_bytes_per_s
    return rates.step.ring_forward_bytes * each, rates.step.ring_backward_bytes * each


def plain_s(
    layer: LayerShape, rates: Rates, *, length: int, token_share: Numbers
) -> tuple[Numbers, Numbers]:
    """Return the seconds of attention whose scores, even masked ones, pass through HBM."""
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
    """Return the seconds of chunked linear attention, forward and backward.

    In the forward pass each token of a chunk is multiplied with every other: keys with keys and
    with queries, the inverse that corrects values and keys, and the outputs; and with the state
    three times. The backward pass takes twice as much and repeats the forward pass.
    """
    within = 3 * layer.qk_dim + 2 * layer.v_dim
    each = DELTA_CHUNK * within + 3 * layer.qk_dim * layer.v_dim
    flops = 2 * layer.heads * each * layer.count * token_share
    # Matmuls of a chunk are as wide as a head, so they reach attention's share of the peak.
    share = rates.attention_share[layer.head_dim]
    forward = flops * rates.op_time_in_a_step / (rates.bf16_flops_per_s * share)
    return forward, 3 * forward
