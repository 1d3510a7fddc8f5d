"""Loss and gradients of a pipelined model, under the GPipe or the 1F1B schedule."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from ...annotations import AnyMesh, PyTree
from .forward import (
    PipelineParams,
    StageFn,
    check_stacked,
    count_microbatches,
    over_stages,
    pipeline,
    stage_mesh,
    sum_over_stages,
)
from .one_f_one_b import OneForwardOneBackward
from .schedule import PipelineSchedule, ScheduleName


def pipeline_value_and_grad(
    stage_fn: StageFn,
    loss_fn: Callable[[PyTree, PyTree, PyTree], PyTree],
    params: PipelineParams,
    inputs: PyTree,
    targets: PyTree,
    *,
    mesh: AnyMesh | None = None,
    axis: str = "stage",
    schedule: ScheduleName = "1f1b",
    first_fn: Callable[[PyTree, PyTree], PyTree] | None = None,
    has_aux: bool = False,
) -> tuple[PyTree, PipelineParams]:
    """The mean loss over micro-batches and its gradients; like `jax.value_and_grad`.

    Both schedules recompute a stage from its input in the backward pass, give the same numbers and
    idle equally long (`PipelineSchedule` draws them). They differ in memory: "gpipe" keeps every
    micro-batch's input of every stage, "1f1b" those of at most 2·stages-1 micro-batches.

    Args:
        stage_fn: `stage_fn(stage_params, x) -> y`, where y has the shapes and types of x.
        loss_fn: `loss_fn(last_params, y, targets) -> loss` of one micro-batch: the final norm, the
            head and the loss. With `has_aux` it returns `(loss, aux)`.
        params: Embedding, stages (stacked, see `split_stages`) and head.
        inputs: What `first_fn` takes, (micro-batches, ...); see `split_microbatches`.
        targets: What `loss_fn` compares with, (micro-batches, ...).
        mesh: Where `axis` is; None uses the mesh in context.
        axis: The mesh axis the stages lie on.
        schedule: "1f1b" or "gpipe".
        first_fn: `first_fn(first_params, inputs) -> x`, the embedding; by default x is `inputs`.
        has_aux: Whether `loss_fn` also returns arrays to add up over micro-batches.

    Returns:
        `(loss, gradients)`, or `((loss, aux), gradients)`; gradients are shaped like `params`.
    """
    in_use, stages = stage_mesh(mesh, axis)
    check_stacked(params.stages, stages, axis)
    microbatches = count_microbatches((inputs, targets))
    plan = PipelineSchedule(schedule, stages, microbatches)

    def first(first_params: Any, inputs: Any) -> Any:
        return inputs if first_fn is None else first_fn(first_params, inputs)

    def loss(last_params: Any, y: Any, targets: Any) -> tuple[Any, Any]:
        result = loss_fn(last_params, y, targets)
        return result if has_aux else (result, ())

    if plan.name == "gpipe":

        def mean_loss(params: PipelineParams) -> tuple[Any, Any]:
            x = lax.map(lambda one: first(params.first, one), inputs)
            y = pipeline(jax.checkpoint(stage_fn), params.stages, x, mesh=mesh, axis=axis)
            losses, aux = lax.map(lambda pair: loss(params.last, *pair), (y, targets))
            return losses.mean(), jax.tree.map(lambda leaf: leaf.sum(0), aux)

        (value, aux), gradients = jax.value_and_grad(mean_loss, has_aux=True)(params)
    else:
        run = OneForwardOneBackward(stage_fn, first, loss, plan, axis)
        split = PipelineParams(P(), P(axis), P())
        mapped = over_stages(run, in_use, axis, in_specs=(split, P(), P()), out_specs=P(axis))
        value, aux, shares = mapped(params, inputs, targets)
        value, aux, first_share, last_share = sum_over_stages(
            (value, aux, shares.first, shares.last)
        )
        gradients = jax.tree.map(
            lambda gradient, param: gradient.astype(param.dtype),
            PipelineParams(first_share, shares.stages, last_share),
            params,
        )
    return ((value, aux) if has_aux else value), gradients
