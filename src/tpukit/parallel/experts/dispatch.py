"""Moving one shard's tokens to their experts and back: fixed buffers, or rows sorted by expert."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...errors import ShardingError
from ...kernels.ops.grouped_matmul.api import XLA, grouped_matmul
from ..mesh.manual_axes import divisors
from .exchange import Exchange, segment_of_row
from .routing import (
    RouterStats,
    Score,
    expert_capacity,
    invert,
    route,
    router_stats,
    sort_assignments,
    within_capacity,
)

ExpertWeights: TypeAlias = tuple[Array | None, Array, Array]  # gate (E, d, f), up, down (E, f, d)
RoutingMethod: TypeAlias = Literal["capacity", "dropless"]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


@dataclass(frozen=True)
class MoESettings:
    """What a shard must know beside its arrays; the arguments of `moe_ffn`, localized."""

    k: int
    routing: RoutingMethod
    capacity_factor: float
    normalize: bool
    score: Score
    activation: str
    groups_here: int
    expert_axis: str | None  # None: every expert is on this device
    token_axes: tuple[str, ...]
    kernels: bool  # whether no mesh axis is automatic, so that Pallas kernels can be used


def moe_shard(
    x: Array,
    router_w: Array,
    router_bias: Array | None,
    slots: Array | None,
    weights: ExpertWeights,
    *,
    settings: MoESettings,
) -> tuple[Array, RouterStats]:
    """`moe_ffn` on the tokens and experts of one device, inside a manual region."""
    tokens = x.reshape(-1, x.shape[-1])
    precise = jnp.promote_types(x.dtype, jnp.float32)
    logits = tokens.astype(precise) @ router_w.astype(precise)
    choice = route(
        logits, settings.k, normalize=settings.normalize, score=settings.score, bias=router_bias
    )
    # From here on experts are numbered by where their weights lie.
    experts = choice.experts if slots is None else slots[choice.experts]
    if settings.routing == "capacity":
        expert_rows, kept = _through_buffers(tokens, experts, weights, router_w, settings)
    else:
        expert_rows, kept = _through_sorted_rows(tokens, experts, weights, router_w, settings), None
    combined = (expert_rows.astype(precise) * choice.weights[..., None]).sum(1)
    stats = router_stats(choice, kept=kept, axes=settings.token_axes)
    return combined.astype(x.dtype).reshape(x.shape), stats


def _through_buffers(
    tokens: Array,
    experts: Array,
    weights: ExpertWeights,
    router_w: Array,
    settings: MoESettings,
) -> tuple[Array, Array]:
    """Every expert gets `capacity` rows of every group; gives (T, k, d) and who fitted."""
    num_experts, k, groups = router_w.shape[-1], settings.k, settings.groups_here
    size = _group_size(tokens.shape[0], groups)
    capacity = expert_capacity(
        size, num_experts=num_experts, k=k, capacity_factor=settings.capacity_factor
    )
    buffers_size = groups * num_experts * capacity

    # An expert has a buffer in every group, so (group, expert) is what pairs are sorted by.
    group = jnp.arange(tokens.shape[0]) // size
    buffers = group[:, None] * num_experts + experts
    sorted_pairs = sort_assignments(buffers, groups * num_experts)
    kept = within_capacity(buffers, sorted_pairs, capacity)
    position = sorted_pairs.place.reshape(buffers.shape) - sorted_pairs.starts[buffers]
    row_of_pair = jnp.where(kept, buffers * capacity + position, buffers_size)
    row = jnp.arange(capacity)
    pair = sorted_pairs.order.at[sorted_pairs.starts[:, None] + row].get(mode="clip")
    pair_of_row = jnp.where(row < sorted_pairs.counts[:, None], pair, experts.size)
    rows = take_rows(tokens, pair_of_row // k, row_of_pair)
    rows = rows.reshape(groups, num_experts, capacity, -1)
    rows = rows.swapaxes(0, 1).reshape(num_experts, groups * capacity, -1)
    if settings.expert_axis:
        rows = lax.all_to_all(rows, settings.expert_axis, split_axis=0, concat_axis=1, tiled=True)
    rows = _feed_forward(rows, weights, settings.activation, partial(jnp.einsum, "erd,edf->erf"))
    if settings.expert_axis:
        rows = lax.all_to_all(rows, settings.expert_axis, split_axis=1, concat_axis=0, tiled=True)
    rows = rows.reshape(num_experts, groups, capacity, -1).swapaxes(0, 1)
    rows = rows.reshape(buffers_size, -1)
    return take_rows(rows, row_of_pair, pair_of_row.reshape(-1, 1)), kept


def _through_sorted_rows(
    tokens: Array,
    experts: Array,
    weights: ExpertWeights,
    router_w: Array,
    settings: MoESettings,
) -> Array:
    """Every pair is computed by a grouped matmul over rows sorted by expert; returns (T, k, d)."""
    sorted_pairs = sort_assignments(experts, router_w.shape[-1])
    order, place = sorted_pairs.order, sorted_pairs.place
    rows = take_rows(tokens, order // settings.k, place.reshape(experts.shape))
    if settings.expert_axis is None:
        rows = _grouped_feed_forward(rows, sorted_pairs.counts, weights, settings)
    else:
        rows = _on_other_devices(rows, sorted_pairs.counts, weights, settings)
    return reorder_rows(rows, place, order).reshape(*experts.shape, -1)


def _on_other_devices(
    rows: Array,
    counts: Array,
    weights: ExpertWeights,
    settings: MoESettings,
) -> Array:
    axis = settings.expert_axis
    assert axis is not None
    experts_here = weights[1].shape[0]
    everyones = lax.all_gather(counts, axis).reshape(
        -1, counts.shape[0] // experts_here, experts_here
    )
    exchange = Exchange(everyones.sum(-1), axis, rows.shape[0])
    received = exchange.send(rows)
    # Rows arrive grouped by source, then by expert: regroup them by expert alone.
    arrived = lax.dynamic_index_in_dim(everyones, lax.axis_index(axis), axis=1, keepdims=False)
    segment = segment_of_row(arrived.reshape(-1), exchange.rows_received)
    expert = jnp.where(segment < arrived.size, segment % experts_here, experts_here)
    order = jnp.argsort(expert, stable=True)
    inverse = invert(order)
    sorted_rows = reorder_rows(received, order, inverse)
    # What all devices send here together is, on average, as much as one of them has.
    computed = _grouped_feed_forward(
        sorted_rows, arrived.sum(0), weights, settings, expected_rows=rows.shape[0]
    )
    return exchange.send_back(reorder_rows(computed, inverse, order))


def _grouped_feed_forward(
    rows: Array,
    counts: Array,
    weights: ExpertWeights,
    settings: MoESettings,
    *,
    expected_rows: int | None = None,
) -> Array:
    def multiply(rows: Array, weight: Array) -> Array:
        return grouped_matmul(
            *(rows, weight, counts),
            implementation=None if settings.kernels else XLA,
            expected_rows=expected_rows,
        )

    return _feed_forward(rows, weights, settings.activation, multiply)


def _feed_forward(
    rows: Array,
    weights: ExpertWeights,
    activation: str,
    multiply: Callable[[Array, Array], Array],
) -> Array:
    w_gate, w_up, w_down = weights
    act = ACTIVATIONS[activation]
    hidden = multiply(rows, w_up)
    hidden = act(hidden) if w_gate is None else act(multiply(rows, w_gate)) * hidden
    return multiply(hidden, w_down)


def _group_size(tokens: int, groups: int) -> int:
    if tokens % groups:
        raise ShardingError(
            f"{tokens} tokens (on each shard) cannot be split into {groups} equal capacity groups; "
            f"groups a shard that divide them: {', '.join(map(str, divisors(tokens)[:12]))}."
        )
    return tokens // groups


@jax.custom_vjp
def take_rows(rows: Array, indices: Array, takers: Array) -> Array:
    """Rows by index; an index past the end gives zeros and passes no gradient.

    The gradient of indexing adds rows up where they came from. A TPU does that row after row,
    while routing knows both ways: who took a row as well as which row was taken. So the gradient is
    taken by index too.

    Args:
        rows: (R, d).
        indices: Of any shape: which row goes there.
        takers: (R, n) where each row went, as positions in the flattened `indices`; past their end
            for fewer than n.

    Returns:
        (*indices.shape, d).
    """
    del takers
    return _take(rows, indices)


def _take_forward(rows: Array, indices: Array, takers: Array) -> tuple[Array, Array]:
    return _take(rows, indices), takers


def _take_backward(takers: Array, cotangent: Array) -> tuple[Array, None, None]:
    flat = cotangent.reshape(-1, cotangent.shape[-1])
    return _take(flat, takers).sum(1), None, None


def _take(rows: Array, indices: Array) -> Array:
    return rows.at[indices].get(mode="fill", fill_value=0)


take_rows.defvjp(_take_forward, _take_backward)


def reorder_rows(rows: Array, order: Array, inverse: Array) -> Array:
    """Rows in another order, given with its inverse."""
    return take_rows(rows, order, inverse[:, None])
