"""The mixture-of-experts feed-forward layer, on one device or over a mesh."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from ...annotations import AnyMesh
from ...errors import ShardingError, TPUValidationError, did_you_mean
from ...kernels.partition.sharded_call import manual_axes, sharded_call
from ..mesh.axes import BATCH_ROLES, axes_with_role, share_experts
from ..mesh.manual_axes import axes_of, axis_size, copy_each, describe_axes, divisors, mesh_in_use
from ..mesh.mesh import axis_sizes
from .dispatch import MoESettings, RoutingMethod, moe_shard
from .feed_forward import Activation, ExpertBiases, ExpertWeights
from .routing import ExpertGroups, RouterArrays, RouterSettings, RouterStats, Score


@dataclass(frozen=True)
class ExpertRegion:
    """The mesh axes over which an expert layer is manual, and what they shard.

    A Pallas kernel cannot be partitioned, so it can be used only if no axis is automatic.

    Attributes:
        axes: Every manual axis; empty when the layer needs no region.
        hidden_axes: Axes that shard the experts' hidden dimension, whose outputs are added up.
        hidden_parts: Number of shards of the hidden dimension.
        is_whole: Whether no axis is automatic.
    """

    axes: frozenset[str]
    hidden_axes: tuple[str, ...]
    hidden_parts: int
    is_whole: bool


def region_of(mesh: AnyMesh, token_axes: tuple[str, ...], *, hidden_width: int) -> ExpertRegion:
    """Return the region for tokens sharded over `token_axes` and experts of `hidden_width`.

    Tensor-parallel axes shard the hidden dimension if they divide it. If they do not, or an axis of
    another meaning is left, all but the tokens' axes stay automatic.
    """
    sizes = axis_sizes(mesh)
    already = manual_axes(mesh)
    rest = [name for name in sizes if name not in already and name not in token_axes]
    tensor = tuple(name for name in axes_with_role(rest, "tensor") if sizes[name] > 1)
    parts = math.prod(sizes[name] for name in tensor)
    if hidden_width % parts or any(sizes[name] > 1 for name in rest if name not in tensor):
        return ExpertRegion(frozenset(token_axes), (), 1, is_whole=False)
    return ExpertRegion(frozenset((*token_axes, *rest)), tensor, parts, is_whole=True)


def moe_ffn(
    x: Array,
    router_w: Array,
    w_gate: Array | None,
    w_up: Array,
    w_down: Array,
    *,
    k: int,
    routing: RoutingMethod = "capacity",
    capacity_factor: float = 1.25,
    groups: int | None = None,
    normalize: bool = True,
    score: Score = "softmax",
    router_x: Array | None = None,
    logit_bias: Array | None = None,
    router_bias: Array | None = None,
    expert_groups: int = 0,
    kept_groups: int = 0,
    group_top: int = 2,
    weight_scale: float = 1.0,
    expert_scale: Array | None = None,
    weigh_inputs: bool = False,
    biases: ExpertBiases | None = None,
    activation: str = "silu",
    activation_limit: float = 7.0,
    activation_alpha: float = 1.702,
    float8: bool = False,
    float8_bound: float | None = None,
    placement: Array | Sequence[int] | None = None,
    mesh: AnyMesh | None = None,
    axis: str | None = "expert",
    x_spec: P | None = None,
) -> tuple[Array, RouterStats]:
    """Send every token through its `k` best experts and return the weighted sum of their outputs.

    Args:
        x: (..., d) tokens.
        router_w: (d, E).
        w_gate: (E, d, f), or None for experts without a gate.
        w_up: (E, d, f).
        w_down: (E, f, d).
        k: Experts per token.
        routing: "capacity" gives every expert the same number of rows and drops pairs beyond it (a
            dropped token keeps its residual); "dropless" computes every pair.
        capacity_factor: Head-room over the even share, for "capacity".
        groups: Tokens compete for capacity inside groups of consecutive tokens. The default is one
            group per shard of tokens, so that drops depend on the mesh. Fix the number for the same
            result on every mesh.
        normalize: See `route`.
        score: See `route`.
        router_x: Input of the router, shaped like `x`; None takes `x`.
        logit_bias: (E,) added to the router's logits.
        router_bias: (E,) added to the scores for the choice only; see `route` and
            `update_router_bias`.
        expert_groups: Groups of consecutive experts, of which a token chooses some; 0 has no
            groups.
        kept_groups: How many groups a token may choose from.
        group_top: A group's score is the sum of its `group_top` best scores.
        weight_scale: Multiplies all weights, normalized or not.
        expert_scale: (E,) multiplies the weights of each expert, normalized or not.
        weigh_inputs: Whether weights multiply an expert's input instead of its output.
        biases: Biases of the experts' matmuls.
        activation: "silu", "gelu", "gelu_tanh", "relu", or "clamped_swiglu": see `Activation`.
        activation_limit: For "clamped_swiglu".
        activation_alpha: For "clamped_swiglu".
        float8: Multiply in 8-bit floats, forward and backward; see `grouped_matmul_float8`.
        float8_bound: Weights and rows have one constant scale for magnitudes up to this bound, and
            weights are gathered in 8 bits; None scales by the largest magnitudes of this step.
        placement: (E,) a permutation: row p of the weights and `biases` is expert `placement[p]`
            (see `place_experts`). The result does not depend on it.
        mesh: Mesh with `axis`; None computes all experts here, or uses the mesh in context.
        axis: The mesh axis that shards the experts. With None every device gathers them, as fsdp
            does any weight, and computes its own tokens.
        x_spec: Sharding of `x`. By default the first dimension over the batch axes of the mesh and
            `axis`, so that every device sorts only its own tokens. Tensor-parallel axes shard the
            experts' hidden dimension; see `region_of`.

    Returns:
        The layer's output, shaped like `x`, and the statistics of the full batch.
    """
    if routing not in get_args(RoutingMethod):
        raise TPUValidationError(
            f"Routing '{routing}' is unknown; known are {', '.join(get_args(RoutingMethod))}."
            f"{did_you_mean(routing, get_args(RoutingMethod))}"
        )
    if router_x is not None and router_x.shape != x.shape:
        raise TPUValidationError(
            f"router_x is {router_x.shape}, but x is {x.shape}; the router needs the same tokens."
        )
    num_experts = router_w.shape[-1]
    # Gradients of replicated arrays are summed in this precision.
    precise = jnp.promote_types(x.dtype, jnp.float32)
    router = RouterArrays(router_w, logit_bias, router_bias, expert_scale)
    router.check()
    router = jax.tree.map(lambda array: array.astype(precise), router)
    weights = ExpertWeights(w_gate, w_up, w_down, biases)
    weights.check(num_experts)
    computes = Activation(activation, activation_limit, activation_alpha)
    computes.check(gated=w_gate is not None)
    if float8 and float8_bound is not None:
        weights = weights.in_float8(float8_bound)
    settings = partial(
        MoESettings,
        router=RouterSettings(
            k=k,
            score=score,
            normalize=normalize,
            weight_scale=weight_scale,
            groups=_expert_groups(expert_groups, kept_groups, group_top),
        ),
        activation=computes,
        weigh_inputs=weigh_inputs,
        routing=routing,
        capacity_factor=capacity_factor,
        float8=float8,
        float8_bound=float8_bound,
    )
    slots = None if placement is None else jnp.argsort(jnp.asarray(placement))
    in_use = mesh if mesh is None and axis is None else mesh_in_use(mesh, axis or "")
    spec = x_spec
    if in_use is not None and spec is None:
        spec = _batch_spec(in_use, axis)
    token_axes = () if spec is None else axes_of(spec)
    region = in_use and region_of(in_use, token_axes, hidden_width=w_up.shape[-1])
    if in_use is None or spec is None or region is None or not region.axes:
        here = settings(
            groups_here=groups or 1, expert_axis=None, token_axes=(), hidden_axes=(), kernels=False
        )
        return moe_shard(x, router_x, router, slots, weights, settings=here)

    expert_ways = 1 if axis is None else _check_experts(num_experts, in_use, axis, spec)
    shards = _check_split(x, in_use, spec)
    if groups is not None and groups % shards:
        raise ShardingError(
            f"groups={groups} capacity groups cannot be split over {shards} shards of tokens; "
            f"use a multiple of {shards}."
        )
    here = settings(
        groups_here=(groups or shards) // shards,
        expert_axis=axis if expert_ways > 1 else None,
        token_axes=token_axes,
        hidden_axes=region.hidden_axes,
        kernels=region.is_whole,
    )

    further = 1 if expert_ways > 1 else _further_shares(weights, in_use, region)

    def run(
        tokens: tuple[Array, Array | None],
        router: RouterArrays,
        slots: Array | None,
        weights: ExpertWeights,
    ) -> tuple[Array, RouterStats]:
        (x, router_x), own = jax.tree.map(lambda array: array[0], (tokens, weights))
        own = own.joined(further)
        y, stats = moe_shard(x, router_x, router, slots, own, settings=here)
        return y[None], stats

    tokens_spec = P(region.hidden_axes or None, *spec)
    mapped = sharded_call(
        run,
        in_use,
        in_specs=(tokens_spec, P(), P(), _weight_specs(weights, region, token_axes, axis)),
        out_specs=(tokens_spec, P()),
        axes=region.axes,
        checks_varying=not region.is_whole,  # then it has no Pallas kernels
    )
    y, stats = mapped(
        copy_each((x, router_x), region.hidden_parts),
        router,
        slots,
        copy_each(weights.in_shares(further), shards // expert_ways),
    )
    # Add the shares of the hidden dimension, in their own dtype, as in a tensor-parallel layer.
    return lax.reduce_sum(y, (0,)), stats


def place_experts(weights: Array, placement: Array | Sequence[int]) -> Array:
    """Reorder expert weights (E, ...) so that row p is expert `placement[p]`."""
    return jnp.take(weights, jnp.asarray(placement), axis=0)


def _batch_spec(mesh: AnyMesh, axis: str | None) -> P:
    already_manual = manual_axes(mesh)
    batch_axes = axes_with_role(mesh.axis_names, *BATCH_ROLES)
    wanted = [name for name in mesh.axis_names if name in batch_axes or name == axis]
    return P(tuple(name for name in wanted if name not in already_manual))


def _expert_groups(count: int, kept: int, top: int) -> ExpertGroups | None:
    if count:
        return ExpertGroups(count, kept, top)
    if kept:
        raise TPUValidationError(
            f"kept_groups={kept} was given, but expert_groups is 0; give the number of groups of "
            "experts."
        )
    return None


def _weight_specs(
    weights: ExpertWeights, region: ExpertRegion, token_axes: tuple[str, ...], axis: str | None
) -> ExpertWeights:
    """Return the shardings of copied weights: copies, experts and the hidden dimension."""
    copies = tuple(name for name in token_axes if name != axis) or None
    hidden = region.hidden_axes or None
    widen, narrow = P(copies, axis, None, hidden), P(copies, axis, hidden)
    biases = (narrow, narrow, P(copies, axis))
    specs = (widen, widen, narrow, weights.biases and ExpertBiases._make(biases))
    return ExpertWeights._make(specs)


def _further_shares(weights: ExpertWeights, mesh: AnyMesh, region: ExpertRegion) -> int:
    """Return the number of shares of an expert where fsdp has more devices than experts.

    In these shares gradients are reduce-scattered. A gradient that is sharded along two dimensions
    the compiler would sum in full on every device.
    """
    sizes = axis_sizes(mesh)
    axes = {axis: sizes[axis] for axis in axes_with_role(mesh.axis_names, "fsdp")}
    own, rest = share_experts(weights.up.shape[0], axes)
    shares = math.prod(rest.values())
    divide = all(weight.shape[1] % shares == 0 for weight in weights[1:3])
    return shares if own and divide and not region.hidden_axes else 1


def _check_experts(num_experts: int, mesh: AnyMesh, axis: str, spec: P) -> int:
    """Return the number of shards of the experts; raise if they do not divide."""
    size = axis_size(mesh, axis, needed_for="Expert parallelism")
    if num_experts % size:
        raise ShardingError(
            f"{num_experts} experts cannot be split over '{axis}'={size}; sizes that divide them: "
            f"{', '.join(map(str, divisors(num_experts)))}."
        )
    if axis not in axes_of(spec):
        raise ShardingError(
            f"x_spec={spec} does not split the tokens over '{axis}', so every device of that axis "
            f"would send the same tokens; name it, for example P(('data', '{axis}'))."
        )
    return size


def _check_split(x: Array, mesh: AnyMesh, spec: P) -> int:
    """Return the number of shards of tokens; raise if they do not divide."""
    shards = 1
    for dimension, entry in enumerate(spec):
        pieces = 1
        for name in axes_of(P(entry)):
            pieces *= axis_size(mesh, name, needed_for="x_spec")
        if x.shape[dimension] % pieces:
            raise ShardingError(
                f"Dimension {dimension} of x has {x.shape[dimension]} rows, but x_spec={spec} "
                f"splits it {pieces} ways on {describe_axes(mesh)}; use a multiple of {pieces}."
            )
        shards *= pieces
    return shards
