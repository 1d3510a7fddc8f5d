"""The mixture-of-experts feed-forward layer: on one device, on each for its own, or spread out."""

import math
from collections.abc import Sequence
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from ...annotations import AnyMesh
from ...errors import ShardingError, TPUValidationError, did_you_mean
from ..mesh.axes import BATCH_ROLES, axes_with_role, share_experts
from ..mesh.manual_axes import (
    axes_of,
    axis_size,
    copy_each,
    describe_axes,
    divisors,
    mesh_in_use,
)
from ..mesh.mesh import axis_sizes
from .dispatch import MoESettings, RoutingMethod, moe_shard
from .feed_forward import Activation, ExpertBiases, ExpertWeights
from .region import ExpertRegion, manual_axes, region_of
from .router import RouterArrays, RouterSettings
from .routing import ExpertGroups, RouterStats, Score


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
    """Send every token through its `k` best experts and add up what they say.

    Args:
        x: (..., d) tokens.
        router_w: (d, E).
        w_gate: (E, d, f), or None for experts without a gate.
        w_up: (E, d, f).
        w_down: (E, f, d).
        k: Experts a token.
        routing: "capacity" gives every expert the same number of rows and drops pairs past it
            (a dropped token keeps its residual); "dropless" computes every pair.
        capacity_factor: Head-room over the even share, for "capacity".
        groups: Tokens compete for capacity inside groups of consecutive tokens. By default one
            group a shard of tokens, which makes drops depend on the mesh: fix the number to get
            the same result on every mesh.
        normalize: See `route`.
        score: See `route`.
        router_x: The tokens as the router is to see them, shaped like `x`; None: as they are.
        logit_bias: (E,) added to the router's logits.
        router_bias: (E,) added to the scores for the choice only; see `route` and
            `update_router_bias`.
        expert_groups: Groups of consecutive experts, of which only some stand for choice; 0: every
            expert does.
        kept_groups: How many groups a token may choose from.
        group_top: A group is worth the sum of its so many best scores.
        weight_scale: Multiplies all weights, normalized or not.
        expert_scale: (E,) multiplies the weights of each expert, normalized or not.
        weigh_inputs: Whether weights multiply what goes into an expert, and not what comes out.
        biases: What experts add to their products.
        activation: "silu", "gelu", "gelu_tanh", "relu", or "clamped_swiglu": see `Activation`.
        activation_limit: Of "clamped_swiglu".
        activation_alpha: Of "clamped_swiglu".
        float8: Multiply in eight-bit floats, forward and backward; see `grouped_matmul_float8`.
        float8_bound: With it weights and rows have one constant scale that keeps magnitudes up to
            it, and weights are gathered in eight bits; None scales by the largest of this step.
        placement: (E,) a permutation: the weights' row p holds expert `placement[p]` (see
            `place_experts`), and so do `biases`. The result does not depend on it.
        mesh: Where `axis` is; None computes all experts here, or uses the mesh in context.
        axis: The mesh axis the experts are split over; None when they are not: every device then
            gathers them, as fsdp does any weight, and computes its own tokens.
        x_spec: How `x` is split over the mesh. By default the first dimension over the batch axes
            of the mesh and `axis`, so that every device sorts only its own tokens. Tensor-parallel
            axes split the experts' hidden dimension; see `region_of`.

    Returns:
        The layer's output, shaped like `x`, and the statistics of the whole batch.
    """
    if routing not in get_args(RoutingMethod):
        raise TPUValidationError(
            f"Routing '{routing}' is unknown; known are {', '.join(get_args(RoutingMethod))}."
            f"{did_you_mean(routing, get_args(RoutingMethod))}"
        )
    if router_x is not None and router_x.shape != x.shape:
        raise TPUValidationError(
            f"router_x is {router_x.shape} and x {x.shape}; the router needs the same tokens."
        )
    num_experts = router_w.shape[-1]
    # Gradients of what every device has are summed in this precision.
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
        own = own.in_whole(further)
        y, stats = moe_shard(x, router_x, router, slots, own, settings=here)
        return y[None], stats

    tokens_spec = P(region.hidden_axes or None, *spec)
    mapped = jax.shard_map(
        run,
        mesh=in_use,
        in_specs=(tokens_spec, P(), P(), _weight_specs(weights, region, token_axes, axis)),
        out_specs=(tokens_spec, P()),
        axis_names=set(region.axes),
        check_vma=not region.is_whole,  # it knows no Pallas kernels
    )
    y, stats = mapped(
        copy_each((x, router_x), region.hidden_parts),
        router,
        slots,
        copy_each(weights.in_shares(further), shards // expert_ways),
    )
    # Each part of the hidden dimension made its share. In their own dtype, as a product of a
    # tensor-parallel layer is summed.
    return lax.reduce_sum(y, (0,)), stats


def place_experts(weights: Array, placement: Array | Sequence[int]) -> Array:
    """Reorder expert weights (E, ...) so that row p holds expert `placement[p]`."""
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
            f"kept_groups={kept} was given and expert_groups is 0; say into how many groups the "
            "experts fall."
        )
    return None


def _weight_specs(
    weights: ExpertWeights, region: ExpertRegion, token_axes: tuple[str, ...], axis: str | None
) -> ExpertWeights:
    """How `copy_each` of the weights is split: copies, experts and the hidden dimension."""
    copies = tuple(name for name in token_axes if name != axis) or None
    hidden = region.hidden_axes or None
    widen, narrow = P(copies, axis, None, hidden), P(copies, axis, hidden)
    biases = (narrow, narrow, P(copies, axis))
    specs = (widen, widen, narrow, weights.biases and ExpertBiases._make(biases))
    return ExpertWeights._make(specs)


def _further_shares(weights: ExpertWeights, mesh: AnyMesh, region: ExpertRegion) -> int:
    """Into how many shares fsdp cuts an expert where there are more devices than experts.

    In these shares, and not in whole experts, gradients are summed and scattered at once: what is
    split along two dimensions the compiler sums whole on every device.
    """
    sizes = axis_sizes(mesh)
    axes = {axis: sizes[axis] for axis in axes_with_role(mesh.axis_names, "fsdp")}
    own, rest = share_experts(weights.up.shape[0], axes)
    shares = math.prod(rest.values())
    divide = all(weight.shape[1] % shares == 0 for weight in weights[1:3])
    return shares if own and divide and not region.hidden_axes else 1


def _check_experts(num_experts: int, mesh: AnyMesh, axis: str, spec: P) -> int:
    """Into how many parts the experts are split; raises when they cannot be."""
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
    """The number of shards of tokens; raises when tokens cannot be split."""
    shards = 1
    for dimension, entry in enumerate(spec):
        pieces = 1
        for name in axes_of(P(entry)):
            pieces *= axis_size(mesh, name, needed_for="x_spec")
        if x.shape[dimension] % pieces:
            raise ShardingError(
                f"Dimension {dimension} of x has {x.shape[dimension]} rows and x_spec={spec} "
                f"splits it {pieces} ways on {describe_axes(mesh)}; use a multiple of {pieces}."
            )
        shards *= pieces
    return shards
