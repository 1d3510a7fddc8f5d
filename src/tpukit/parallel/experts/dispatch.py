"""Move one shard's tokens to their experts and back, by fixed buffers or rows sorted by expert."""

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
from .feed_forward import Activation, ExpertWeight, ExpertWeights, add_to_groups, feed_forward
from .float8 import Float8Weight, grouped_matmul_float8
from .routing import (
    RouterArrays,
    RouterSettings,
    RouterStats,
    choose_experts,
    expert_capacity,
    invert,
    router_stats,
    sort_assignments,
    within_capacity,
)

RoutingMethod: TypeAlias = Literal["capacity", "dropless"]


@dataclass(frozen=True)
class MoESettings:
    """Static settings of a shard: the arguments of `moe_ffn` for one device."""

    router: RouterSettings
    activation: Activation
    weigh_inputs: bool
    routing: RoutingMethod
    capacity_factor: float
    groups_here: int
    expert_axis: str | None  # None: every expert is on this device
    token_axes: tuple[str, ...]
    hidden_axes: tuple[str, ...]  # axes that shard the experts' hidden dimension
    kernels: bool  # whether no mesh axis is automatic, so that Pallas kernels can be used
    float8: bool
    float8_bound: float | None


def moe_shard(
    x: Array,
    router_x: Array | None,
    router: RouterArrays,
    slots: Array | None,
    weights: ExpertWeights,
    *,
    settings: MoESettings,
) -> tuple[Array, RouterStats]:
    """Run `moe_ffn` on the tokens and experts of one device, inside a manual region."""
    tokens = x.reshape(-1, x.shape[-1])
    looked_at = tokens if router_x is None else router_x.reshape(tokens.shape)
    choice = choose_experts(looked_at, router, settings.router)
    pair_weights = choice.weights[..., None]
    # From here on experts are numbered by the position of their weights.
    experts = choice.experts if slots is None else slots[choice.experts]
    inputs = tokens
    if settings.weigh_inputs:
        inputs = (tokens[:, None] * pair_weights).astype(x.dtype).reshape(-1, x.shape[-1])
    through = _through_buffers if settings.routing == "capacity" else _through_sorted_rows
    weights = _with_down_bias_once(weights, settings)
    outputs, kept = through(inputs, experts, weights, router.weight.shape[-1], settings)
    outputs = outputs.astype(pair_weights.dtype)
    combined = (outputs if settings.weigh_inputs else outputs * pair_weights).sum(1)
    stats = router_stats(choice, kept=kept, axes=settings.token_axes)
    return combined.astype(x.dtype).reshape(x.shape), stats


def _with_down_bias_once(weights: ExpertWeights, settings: MoESettings) -> ExpertWeights:
    """Return biases in which only one shard of the hidden dimension adds `down`."""
    if weights.biases is None or not settings.hidden_axes:
        return weights
    is_first = lax.axis_index(settings.hidden_axes) == 0
    biases = weights.biases
    return weights._replace(
        biases=biases._replace(down=jnp.where(is_first, biases.down, jnp.zeros_like(biases.down)))
    )


def _through_buffers(
    inputs: Array,
    experts: Array,
    weights: ExpertWeights,
    num_experts: int,
    settings: MoESettings,
) -> tuple[Array, Array]:
    """Give every expert `capacity` rows per group; return (T, k, d) and which pairs fit.

    `inputs` has a row per token, or per pair of a token and its choice.
    """
    (tokens, k), groups = experts.shape, settings.groups_here
    size = _group_size(tokens, groups)
    capacity = expert_capacity(
        size, num_experts=num_experts, k=k, capacity_factor=settings.capacity_factor
    )
    buffers_size = groups * num_experts * capacity

    # An expert has a buffer in every group, so pairs are sorted by (group, expert).
    group = jnp.arange(tokens) // size
    buffers = group[:, None] * num_experts + experts
    sorted_pairs = sort_assignments(buffers, groups * num_experts)
    kept = within_capacity(buffers, sorted_pairs, capacity)
    position = sorted_pairs.place.reshape(buffers.shape) - sorted_pairs.starts[buffers]
    row_of_pair = jnp.where(kept, buffers * capacity + position, buffers_size)
    row = jnp.arange(capacity)
    pair = sorted_pairs.order.at[sorted_pairs.starts[:, None] + row].get(mode="clip")
    pair_of_row = jnp.where(row < sorted_pairs.counts[:, None], pair, experts.size)
    pairs_each = experts.size // inputs.shape[0]
    rows = take_rows(inputs, pair_of_row // pairs_each, row_of_pair.reshape(-1, pairs_each))
    rows = rows.reshape(groups, num_experts, capacity, -1)
    rows = rows.swapaxes(0, 1).reshape(num_experts, groups * capacity, -1)
    if settings.expert_axis:
        rows = lax.all_to_all(rows, settings.expert_axis, split_axis=0, concat_axis=1, tiled=True)
    rows = feed_forward(
        *(rows, weights, settings.activation),
        multiply=partial(_multiply_buffers, settings=settings),
        add_bias=lambda rows, bias: rows + bias[:, None],
    )
    if settings.expert_axis:
        rows = lax.all_to_all(rows, settings.expert_axis, split_axis=1, concat_axis=0, tiled=True)
    rows = rows.reshape(num_experts, groups, capacity, -1).swapaxes(0, 1)
    rows = rows.reshape(buffers_size, -1)
    return take_rows(rows, row_of_pair, pair_of_row.reshape(-1, 1)), kept


def _through_sorted_rows(
    inputs: Array,
    experts: Array,
    weights: ExpertWeights,
    num_experts: int,
    settings: MoESettings,
) -> tuple[Array, None]:
    """Compute every pair by a grouped matmul over rows sorted by expert; return (T, k, d)."""
    sorted_pairs = sort_assignments(experts, num_experts)
    order, place = sorted_pairs.order, sorted_pairs.place
    pairs_each = experts.size // inputs.shape[0]
    rows = take_rows(inputs, order // pairs_each, place.reshape(-1, pairs_each))
    if settings.expert_axis is None:
        rows = _grouped_feed_forward(rows, sorted_pairs.counts, weights, settings)
    else:
        rows = _on_other_devices(rows, sorted_pairs.counts, weights, settings)
    return reorder_rows(rows, place, order).reshape(*experts.shape, -1), None


def _on_other_devices(
    rows: Array,
    counts: Array,
    weights: ExpertWeights,
    settings: MoESettings,
) -> Array:
    axis = settings.expert_axis
    assert axis is not None
    experts_here = weights.up.shape[0]
    everyones = lax.all_gather(counts, axis).reshape(
        -1, counts.shape[0] // experts_here, experts_here
    )
    exchange = Exchange(everyones.sum(-1), axis, rows.shape[0])
    received = exchange.send(rows)
    # Rows arrive grouped by source, then by expert; regroup them by expert alone.
    arrived = lax.dynamic_index_in_dim(everyones, lax.axis_index(axis), axis=1, keepdims=False)
    segment = segment_of_row(arrived.reshape(-1), exchange.rows_received)
    expert = jnp.where(segment < arrived.size, segment % experts_here, experts_here)
    order = jnp.argsort(expert, stable=True)
    inverse = invert(order)
    sorted_rows = reorder_rows(received, order, inverse)
    # All devices together send here, on average, as many rows as one of them has.
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
    def multiply(rows: Array, weight: ExpertWeight) -> Array:
        return _multiply_groups(rows, weight, counts, settings, expected_rows=expected_rows)

    return feed_forward(
        *(rows, weights, settings.activation),
        multiply=multiply,
        add_bias=partial(add_to_groups, counts=counts),
    )


def _multiply_groups(
    rows: Array,
    weight: ExpertWeight,
    counts: Array,
    settings: MoESettings,
    *,
    expected_rows: int | None = None,
) -> Array:
    implementation = None if settings.kernels else XLA
    if isinstance(weight, Float8Weight) or settings.float8:
        return grouped_matmul_float8(
            *(rows, weight, counts),
            bound=settings.float8_bound,
            implementation=implementation,
            expected_rows=expected_rows,
        )
    return grouped_matmul(
        *(rows, weight, counts), implementation=implementation, expected_rows=expected_rows
    )


def _multiply_buffers(rows: Array, weight: ExpertWeight, *, settings: MoESettings) -> Array:
    """Multiply full buffers (E, R, d) by the weights of their experts."""
    if not isinstance(weight, Float8Weight) and not settings.float8:
        return jnp.einsum("erd,edf->erf", rows, weight)
    experts, size, width = rows.shape
    counts = jnp.full((experts,), size, jnp.int32)
    product = _multiply_groups(rows.reshape(-1, width), weight, counts, settings)
    return product.reshape(experts, size, -1)


def _group_size(tokens: int, groups: int) -> int:
    if tokens % groups:
        raise ShardingError(
            f"{tokens} tokens (on each shard) cannot be split into {groups} equal capacity groups; "
            "numbers of groups per shard that divide them: "
            f"{', '.join(map(str, divisors(tokens)[:12]))}."
        )
    return tokens // groups


@jax.custom_vjp
def take_rows(rows: Array, indices: Array, takers: Array) -> Array:
    """Take rows by index; an index past the end gives zeros and has no gradient.

    The gradient of indexing adds rows up where they came from, which a TPU does row by row. Routing
    knows both directions: which row was taken, and where each row went. So the gradient takes rows
    by index too.

    Args:
        rows: (R, d).
        indices: Row numbers, in any shape.
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
    """Return rows in another order, given with its inverse."""
    return take_rows(rows, order, inverse[:, None])
