"""Loss and gradients of a pipelined model, under the GPipe or the 1F1B schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from ...annotations import AnyMesh, PyTree
from .forward import (
    PipelineParams,
    StageFn,
    check_same,
    check_stacked,
    count_microbatches,
    over_stages,
    own_stage,
    pass_along,
    pipeline,
    select,
    stage_mesh,
    sum_over_stages,
)
from .schedule import PipelineSchedule, ScheduleName, backward_microbatch, forward_microbatch


class _Forward(NamedTuple):
    arriving: PyTree  # from the stage before
    saved: PyTree  # (buffers, ...) inputs of the micro-batches in flight


class _Backward(NamedTuple):
    arriving: list[Array]  # gradients from the stage after, of the floating leaves
    gradients: PipelineParams
    loss: Array
    aux: PyTree


@dataclass(frozen=True)
class OneForwardOneBackward:
    """One device's part of the 1F1B schedule, called inside a region where `axis` is manual."""

    stage_fn: StageFn
    first_fn: Callable[[PyTree, PyTree], PyTree]
    loss_fn: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    plan: PipelineSchedule
    axis: str

    def __call__(
        self, params: PipelineParams, inputs: PyTree, targets: PyTree
    ) -> tuple[Array, PyTree, PipelineParams]:
        """Return this stage's share of loss, aux and gradients, each with a leading dimension of 1.

        The loss, aux and the gradients of `first` and `last` are to be added up over the stages.
        """
        here = params._replace(stages=own_stage(params.stages))
        batch = (here, inputs, targets)
        stages, microbatches = self.plan.stages, self.plan.microbatches

        def forward_slot(state: _Forward, tick: Array) -> tuple[_Forward, None]:
            return self._forward(batch, state, tick), None

        def both_slots(
            state: tuple[_Forward, _Backward], tick: Array
        ) -> tuple[tuple[_Forward, _Backward], None]:
            forward = self._forward(batch, state[0], tick)
            return (forward, self._backward(batch, forward.saved, state[1], tick)), None

        forward, backward = self._start(batch)
        first_backward, end = stages - 1, microbatches + stages - 1
        forward, _ = lax.scan(forward_slot, forward, jnp.arange(first_backward))
        (forward, backward), _ = lax.scan(
            both_slots, (forward, backward), jnp.arange(first_backward, end)
        )

        def backward_slot(state: _Backward, tick: Array) -> tuple[_Backward, None]:
            return self._backward(batch, forward.saved, state, tick), None

        backward, _ = lax.scan(backward_slot, backward, jnp.arange(end, end + first_backward))
        return jax.tree.map(
            lambda leaf: leaf[None], (backward.loss, backward.aux, backward.gradients)
        )

    def _start(self, batch: tuple[PipelineParams, PyTree, PyTree]) -> tuple[_Forward, _Backward]:
        here, inputs, targets = batch

        def one_microbatch() -> tuple[PyTree, tuple[PyTree, PyTree]]:
            x = self.first_fn(here.first, _at(inputs, 0))
            y = self.stage_fn(here.stages, x)
            check_same(x, y)
            return x, self.loss_fn(here.last, y, _at(targets, 0))

        x, (loss, aux) = jax.eval_shape(one_microbatch)

        buffers = self.plan.buffers
        forward = _Forward(
            jax.tree.map(jnp.zeros_like, x),
            jax.tree.map(lambda leaf: jnp.zeros((buffers, *leaf.shape), leaf.dtype), x),
        )
        backward = _Backward(
            [jnp.zeros_like(leaf) for leaf in _Floats.of(x).leaves],
            # Sums over many micro-batches lose bits in bfloat16.
            jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), here
            ),
            jnp.zeros_like(loss),
            jax.tree.map(jnp.zeros_like, aux),
        )
        return forward, backward

    def _forward(
        self, batch: tuple[PipelineParams, PyTree, PyTree], state: _Forward, tick: Array
    ) -> _Forward:
        here, inputs, _ = batch
        stage = lax.axis_index(self.axis)
        microbatch, active = self._work(forward_microbatch(tick, stage))
        x = select(stage == 0, self.first_fn(here.first, _at(inputs, microbatch)), state.arriving)
        slot = microbatch % self.plan.buffers
        kept = select(active, x, _at(state.saved, slot))
        saved = jax.tree.map(lambda buffer, leaf: buffer.at[slot].set(leaf), state.saved, kept)
        y = self.stage_fn(here.stages, x)
        return _Forward(pass_along(y, self.axis, self.plan.stages), saved)

    def _backward(
        self,
        batch: tuple[PipelineParams, PyTree, PyTree],
        saved: PyTree,
        state: _Backward,
        tick: Array,
    ) -> _Backward:
        here, inputs, targets = batch
        stage, stages = lax.axis_index(self.axis), self.plan.stages
        microbatch, active = self._work(backward_microbatch(tick, stage, stages))
        x = _Floats.of(_at(saved, microbatch % self.plan.buffers))

        def run_stage(params: PyTree, leaves: list[Array]) -> tuple[list[Array], PyTree]:
            y = _Floats.of(self.stage_fn(params, x.put(leaves)))
            return y.leaves, y

        def run_loss(params: PyTree, leaves: list[Array]) -> tuple[Array, PyTree]:
            loss, aux = self.loss_fn(params, y.put(leaves), _at(targets, microbatch))
            return loss / self.plan.microbatches, aux

        y_leaves, pull_stage, y = jax.vjp(run_stage, here.stages, x.leaves, has_aux=True)
        (loss, aux), (d_last, d_y) = jax.value_and_grad(run_loss, argnums=(0, 1), has_aux=True)(
            here.last, y_leaves
        )
        d_stage, d_x = pull_stage(select(stage == stages - 1, d_y, state.arriving))

        def run_first(params: PyTree) -> list[Array]:
            return _Floats.of(self.first_fn(params, _at(inputs, microbatch))).leaves

        _, pull_first = jax.vjp(run_first, here.first)
        (d_first,) = pull_first(d_x)

        def add(to: PyTree, more: PyTree, where: Array) -> PyTree:
            return jax.tree.map(lambda a, b: jnp.where(where, a + b, a), to, more)

        is_first, is_last = active & (stage == 0), active & (stage == stages - 1)
        return _Backward(
            pass_along(d_x, self.axis, stages, step=-1),
            PipelineParams(
                add(state.gradients.first, d_first, is_first),
                add(state.gradients.stages, d_stage, active),
                add(state.gradients.last, d_last, is_last),
            ),
            add(state.loss, loss, is_last),
            add(state.aux, aux, is_last),
        )

    def _work(self, microbatch: Array) -> tuple[Array, Array]:
        """Return the micro-batch, clipped to the valid range, and whether there is one."""
        active = (microbatch >= 0) & (microbatch < self.plan.microbatches)
        return jnp.clip(microbatch, 0, self.plan.microbatches - 1), active


class _Floats(NamedTuple):
    """The leaves of a tree that have gradients; the others (ids, positions) pass through."""

    leaves: list[Any]
    tree: PyTree

    @classmethod
    def of(cls, tree: PyTree) -> "_Floats":
        return cls([leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)], tree)

    def put(self, leaves: list[Array]) -> PyTree:
        """Return the tree with other floating leaves."""
        coming = iter(leaves)
        return jax.tree.map(lambda leaf: next(coming) if _is_float(leaf) else leaf, self.tree)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _at(tree: PyTree, index: Array | int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[index], tree)


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
    """Return the mean loss over micro-batches and its gradients, like `jax.value_and_grad`.

    Both schedules recompute a stage from its input in the backward pass, give the same numbers and
    idle equally long (`PipelineSchedule` draws them). They differ in memory: "gpipe" keeps every
    micro-batch's input of every stage, "1f1b" those of at most 2·stages-1 micro-batches.

    Args:
        stage_fn: `stage_fn(stage_params, x) -> y`, where y has the shapes and dtypes of x.
        loss_fn: `loss_fn(last_params, y, targets) -> loss` of one micro-batch: the final norm, the
            head and the loss. With `has_aux` it returns `(loss, aux)`.
        params: Embedding, stages (stacked, see `split_stages`) and head.
        inputs: Inputs of `first_fn`, (micro-batches, ...); see `split_microbatches`.
        targets: Targets of `loss_fn`, (micro-batches, ...).
        mesh: Mesh with `axis`; None uses the mesh in context.
        axis: The mesh axis of the stages.
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

    def first(first_params: PyTree, inputs: PyTree) -> PyTree:
        return inputs if first_fn is None else first_fn(first_params, inputs)

    def loss(last_params: PyTree, y: PyTree, targets: PyTree) -> tuple[PyTree, PyTree]:
        result = loss_fn(last_params, y, targets)
        return result if has_aux else (result, ())

    if plan.name == "gpipe":

        def mean_loss(params: PipelineParams) -> tuple[PyTree, PyTree]:
            x = lax.map(lambda microbatch: first(params.first, microbatch), inputs)
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
