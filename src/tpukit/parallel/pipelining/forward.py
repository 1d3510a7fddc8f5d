"""Pipeline parallelism: a model in stages along a mesh axis, fed with micro-batches."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from ...annotations import AnyMesh, PyTree
from ...errors import MeshError, ShardingError
from ...kernels.partition.sharded_call import sharded_call
from ..mesh.manual_axes import axis_size, copy_each, divisors, mesh_in_use

Tree = TypeVar("Tree")
StageFn = Callable[[PyTree, PyTree], PyTree]


class PipelineParams(NamedTuple):
    """The parameters of a pipelined model, or their gradients."""

    first: PyTree  # of `first_fn` (the embedding); on every stage
    stages: PyTree  # of `stage_fn`, stacked: (stages, ...)
    last: PyTree  # of `loss_fn` (the final norm and head); on every stage


def pipeline(
    stage_fn: StageFn,
    stage_params: PyTree,
    x: Tree,
    *,
    mesh: AnyMesh | None = None,
    axis: str = "stage",
) -> Tree:
    """Run micro-batches through the stages, one stage per device of `axis`; differentiable.

    Other mesh axes stay automatic: a stage may itself be sharded over data, fsdp or model axes, and
    may contain a ring attention or an expert layer over its own axis. Differentiating this is the
    GPipe schedule, which keeps what `stage_fn` saves for every micro-batch (wrap `stage_fn` in
    `jax.checkpoint` to keep only its input); `pipeline_value_and_grad` can keep less.

    Args:
        stage_fn: `stage_fn(params, x) -> y`, where y has the shapes and dtypes of x.
        stage_params: Arrays (stages, ...); see `split_stages` for a stack of layers.
        x: An array, or a tree of arrays, (micro-batches, ...); see `split_microbatches`. A tree can
            carry segment ids or a running auxiliary loss.
        mesh: Mesh with `axis`; None uses the mesh in context.
        axis: The mesh axis of the stages.

    Returns:
        The last stage's output for every micro-batch, (micro-batches, ...).
    """
    in_use, stages = stage_mesh(mesh, axis)
    check_stacked(stage_params, stages, axis)
    count_microbatches(x)

    def run(stage_params: PyTree, x: Tree) -> Tree:
        params, x = own_stage((stage_params, x))
        stage = lax.axis_index(axis)
        feed = jax.tree.map(lambda leaf: _pad(leaf, stages - 1), x)

        def tick(arriving: Tree, fed: Tree) -> tuple[Tree, Tree]:
            y = stage_fn(params, select(stage == 0, fed, arriving))
            check_same(arriving, y)
            return pass_along(y, axis, stages), y

        # Idle stages compute real data, never zeros, so that no NaN can arise behind a mask.
        start = jax.tree.map(lambda leaf: leaf[0], feed)
        _, made = lax.scan(tick, start, feed)
        made = jax.tree.map(lambda leaf: leaf[stages - 1 :], made)
        return stage_term(stage == stages - 1, made)

    mapped = over_stages(run, in_use, axis, in_specs=P(axis), out_specs=P(axis))
    return sum_over_stages(mapped(stage_params, copy_each(x, stages)))


def split_stages(layers: Tree, stages: int) -> Tree:
    """Split a stack of layers (layers, ...) into stages (stages, layers/stages, ...).

    Raises:
        ShardingError: The layers do not divide by the stages.
    """

    def split(leaf: Array) -> Array:
        if leaf.shape[0] % stages:
            raise ShardingError(
                f"{leaf.shape[0]} layers cannot be split into {stages} pipeline stages; numbers of "
                f"stages that divide them: {', '.join(map(str, divisors(leaf.shape[0])))}."
            )
        return leaf.reshape(stages, -1, *leaf.shape[1:])

    return jax.tree.map(split, layers)


def join_stages(stages: Tree) -> Tree:
    """Undo `split_stages`."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stages)


def split_microbatches(batch: Tree, microbatches: int) -> Tree:
    """Split a batch (B, ...) into (micro-batches, B/micro-batches, ...).

    Micro-batch m gets rows m, m + micro-batches, …, so that each has rows of every data shard, and
    nothing moves between devices.

    Raises:
        ShardingError: The batch does not divide by the micro-batches.
    """

    def split(leaf: Array) -> Array:
        if microbatches < 1 or leaf.shape[0] % microbatches:
            raise ShardingError(
                f"A batch of {leaf.shape[0]} cannot be split into {microbatches} micro-batches; "
                f"numbers that divide it: {', '.join(map(str, divisors(leaf.shape[0])))}."
            )
        return leaf.reshape(-1, microbatches, *leaf.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, batch)


def join_microbatches(batch: Tree) -> Tree:
    """Undo `split_microbatches`."""
    return jax.tree.map(lambda leaf: leaf.swapaxes(0, 1).reshape(-1, *leaf.shape[2:]), batch)


def stage_mesh(mesh: AnyMesh | None, axis: str) -> tuple[AnyMesh, int]:
    """Return the mesh of the pipeline and its number of stages.

    Raises:
        MeshError: There is no mesh, or it has no such axis.
    """
    in_use = mesh_in_use(mesh, axis)
    if in_use is None:
        raise MeshError(
            f"A pipeline needs a mesh with the axis '{axis}', but none is in context; pass mesh=, "
            "or enter one with jax.set_mesh."
        )
    return in_use, axis_size(in_use, axis, needed_for="The pipeline")


def check_stacked(stage_params: PyTree, stages: int, axis: str) -> None:
    """Raise ShardingError unless every array is stacked by stage."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(stage_params):
        if leaf.ndim == 0 or leaf.shape[0] != stages:
            raise ShardingError(
                f"Stage parameter {jax.tree_util.keystr(path) or '(the array)'} is {leaf.shape} "
                f"and '{axis}'={stages}: its first dimension must be the stage. Use "
                f"split_stages(params, {stages}) on a stack of layers."
            )


def count_microbatches(x: PyTree) -> int:
    """Return the length of the first dimension, which all arrays of `x` share."""
    counts = {leaf.shape[0] for leaf in jax.tree.leaves(x)}
    if len(counts) != 1:
        raise ShardingError(
            f"The arrays of a pipeline's input have {sorted(counts)} micro-batches; they must all "
            "have the same number: use split_microbatches on the whole batch at once."
        )
    return counts.pop()


def check_same(x: PyTree, y: PyTree) -> None:
    """Raise ShardingError unless a stage returns the shapes and dtypes of its input."""
    shapes = [jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree) for tree in (x, y)]
    if shapes[0] != shapes[1]:
        raise ShardingError(
            f"stage_fn takes {shapes[0]} but returns {shapes[1]}; every stage must return what the "
            "next one takes. Do the first and last change of shape in first_fn and loss_fn."
        )


def over_stages(
    run: Callable[..., Any], mesh: AnyMesh, axis: str, *, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """Run `run` on every stage, manual over `axis` alone.

    jax's check of varying axes is off: with it a stage could not scan from a constant, nor could
    the gradient of a nested shard_map (ring attention, experts) be lowered. Such a region runs only
    when compiled, hence the jit.
    """
    mapped = sharded_call(run, mesh, in_specs=in_specs, out_specs=out_specs, axes={axis})
    return jax.jit(mapped)


def own_stage(stage_params: Tree) -> Tree:
    """Return this device's stage of the stack."""
    return jax.tree.map(lambda leaf: leaf[0], stage_params)


def select(condition: Array, yes: Tree, no: Tree) -> Tree:
    """Apply `jnp.where` to trees."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def pass_along(tree: Tree, axis: str, stages: int, *, step: int = 1) -> Tree:
    """Send arrays `step` stages on; what passes an end arrives at the other and is ignored."""
    ring = [(stage, (stage + step) % stages) for stage in range(stages)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, ring), tree)


def stage_term(condition: Array, tree: Tree) -> Tree:
    """Return this stage's term of a sum over stages: `tree` where `condition` holds, else zeros."""
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, jnp.zeros_like(leaf))[None], tree)


def sum_over_stages(tree: Tree) -> Tree:
    """Add up the stages' terms, outside the manual region (see `copy_each`)."""
    return jax.tree.map(lambda leaf: leaf.sum(0).astype(leaf.dtype), tree)


def _pad(x: Array, more: int) -> Array:
    return jnp.concatenate([x, jnp.repeat(x[-1:], more, axis=0)])
