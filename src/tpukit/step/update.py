"""Gradients and new state of one step: at once, in micro-batches, or through a pipeline."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..annotations import AnyMesh, PyTree
from ..errors import ShardingError, TPUModelError
from ..models.adapters import TransformerAdapter, Variables
from ..models.lora.adapter import LoraAdapter
from ..models.loss import Batch
from ..models.transformer.config import TransformerConfig
from ..models.transformer.shapes import kinds_of_stacks
from ..parallel.experts.routing import RouterStats
from ..parallel.mesh.mesh import axis_sizes
from ..parallel.pipelining.forward import (
    PipelineParams,
    join_stages,
    split_microbatches,
    split_stages,
)
from ..parallel.pipelining.gradient import pipeline_value_and_grad
from ..parallel.sharding.strategy import find_axis
from .parts import StepResult, StepSettings, TrainState, weighted_loss


def updated_state(
    settings: StepSettings,
    transformation: optax.GradientTransformation,
    state: TrainState,
    batch: Batch,
    rng: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Return the state after one step, and the step's metrics."""
    result = loss_and_gradients(settings, Variables(state.params, state.model_state), batch, rng)
    updates, opt_state = transformation.update(result.gradients, state.opt_state, state.params)
    metrics = {
        "loss": result.loss,
        "weight": result.weight,
        **({"grad_norm": optax.tree.norm(result.gradients)} if settings.grad_norm else {}),
        **result.router_metrics(),
    }
    new = TrainState(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
        model_state=result.model_state,
    )
    return new, metrics


def loss_and_gradients(
    settings: StepSettings, variables: Variables, batch: Batch, rng: jax.Array
) -> StepResult:
    """Return the mean loss over the batch and its gradients, with or without micro-batches."""
    mesh = settings.mesh
    stage_axis = find_axis(mesh, settings.strategy, "pipeline") if mesh is not None else None
    if mesh is not None and stage_axis is not None:
        stages = axis_sizes(mesh)[stage_axis]
        return _scaled(
            pipeline_loss_and_gradients(settings, variables, batch, axis=stage_axis, stages=stages)
        )
    if settings.microbatches == 1:
        return _scaled(_one_piece(settings, variables, batch, rng))
    pieces = split_microbatches(dict(batch), settings.microbatches)

    def one(carry: StepResult, piece: tuple[Batch, jax.Array]) -> tuple[StepResult, None]:
        now = Variables(variables.params, carry.model_state)
        result = _one_piece(settings, now, *piece)
        summed = jax.tree.map(
            jnp.add,
            (carry.loss, carry.weight, carry.gradients, carry.router),
            (result.loss, result.weight, result.gradients, result.router),
        )
        loss, weight, gradients, router = summed
        added = StepResult(
            loss=loss,
            weight=weight,
            gradients=gradients,
            router=router,
            model_state=result.model_state,
        )
        return added, None

    rngs = jax.random.split(rng, settings.microbatches)
    first_piece = jax.tree.map(lambda leaf: leaf[0], pieces)
    shapes = jax.eval_shape(lambda: _one_piece(settings, variables, first_piece, rngs[0]))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    start = StepResult(
        loss=zeros.loss,
        weight=zeros.weight,
        gradients=zeros.gradients,
        router=zeros.router,
        model_state=variables.model_state,
    )
    total, _ = jax.lax.scan(one, start, (pieces, rngs))
    return _scaled(total)


def _one_piece(
    settings: StepSettings, variables: Variables, batch: Batch, rng: jax.Array
) -> StepResult:
    """Return the totals of one micro-batch, not yet divided by `weight`."""

    def total(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, Any, Any]]:
        applied = settings.adapter.apply(
            Variables(params, variables.model_state),
            batch,
            rng=rng,
            execution=settings.execution,
        )
        loss = weighted_loss(
            settings.loss, applied.outputs, batch, z_loss=settings.execution.z_loss
        )
        value = loss.total
        if applied.penalty is not None:
            value = value + (applied.penalty * loss.weight).astype(value.dtype)
        return value, (loss.weight, applied.model_state, applied.router)

    (value, (weight, model_state, router)), gradients = jax.value_and_grad(total, has_aux=True)(
        variables.params
    )
    return StepResult(
        loss=value, weight=weight, gradients=gradients, model_state=model_state, router=router
    )


def _scaled(total: StepResult) -> StepResult:
    # Where every label is masked, the gradients are zero instead of NaN.
    weight = jnp.maximum(total.weight, jnp.finfo(total.weight.dtype).tiny)
    return StepResult(
        loss=total.loss / weight,
        weight=total.weight,
        gradients=jax.tree.map(lambda leaf: (leaf / weight).astype(leaf.dtype), total.gradients),
        model_state=total.model_state,
        router=total.router,
    )


_FIRST = ("embed", "position_embed")
_LAST = ("final_norm", "lm_head", "mtp")


def pipeline_loss_and_gradients(
    settings: StepSettings, variables: Variables, batch: Batch, *, axis: str, stages: int
) -> StepResult:
    """Return totals of a batch whose micro-batches flow through the pipeline stages on `axis`.

    `loss` and `gradients` are not yet divided by `weight`.

    Raises:
        TPUModelError: The model is a user model or has LoRA.
    """
    adapter = settings.adapter
    if isinstance(adapter, LoraAdapter):
        raise TPUModelError(
            "the pipeline strategy does not support LoRA; shard the model with fsdp or megatron "
            "instead, or leave lora out."
        )
    if not isinstance(adapter, TransformerAdapter):
        raise TPUModelError(
            "the pipeline strategy needs the layers of a reference transformer, but this is a "
            "user model; call tpukit.parallel.pipeline_value_and_grad with its stages."
        )
    config, execution = adapter.config, settings.execution
    leading, each = _cut(config, stages)

    def first(params: PyTree, piece: Batch) -> dict[str, Any]:
        model = adapter.module(params, execution)
        tokens = piece["inputs"]
        context = model.context(tokens.shape, positions=piece.get("positions"))
        carried: dict[str, PyTree] = {
            "x": model.embed_tokens(tokens, piece.get("positions")),
            "positions": context.positions,
        }
        if "segment_ids" in piece:
            carried["segment_ids"] = piece["segment_ids"]
        if config.has_experts:
            wide = jnp.promote_types(config.dtype, jnp.float32)
            carried["router"] = RouterStats.zeros(config.most_experts, wide)
        return run(params["layers"], carried, leading) if leading else carried

    def stage(layers: PyTree, carried: dict[str, PyTree]) -> dict[str, Any]:
        return run(layers, carried, each)

    def run(layers: PyTree, carried: dict[str, PyTree], order: tuple[str, ...]) -> dict[str, Any]:
        model = adapter.module({"layers": layers}, execution)
        context = model.context(
            carried["positions"].shape,
            positions=carried["positions"],
            segment_ids=carried.get("segment_ids"),
        )
        stacked = adapter.layer_state(layers)
        x, router = model.run_stack(stacked, carried["x"], context, order=order)
        new = {**carried, "x": x}
        if router is not None:
            new["router"] = carried["router"] + router
        return new

    def last(params: PyTree, carried: dict[str, PyTree], piece: Batch) -> tuple[jax.Array, Any]:
        model = adapter.module(params, execution)
        read = adapter.read_out(model, carried["x"], piece, carried.get("router"))
        loss = weighted_loss(settings.loss, read.outputs, piece, z_loss=execution.z_loss)
        total = loss.total
        if read.penalty is not None:
            total = total + (read.penalty * loss.weight).astype(total.dtype)
        return total, (loss.weight, read.router)

    params = variables.params
    before, spread = _split_layers(params["layers"], config, leading)
    parts = PipelineParams(
        first={name: params[name] for name in _FIRST if name in params} | before,
        stages=split_stages(spread, stages),
        last={name: params[name] for name in _last_names(config) if name in params},
    )
    pieces = split_microbatches(dict(batch), settings.microbatches)
    (mean, (weight, router)), gradients = pipeline_value_and_grad(
        stage,
        last,
        parts,
        pieces,
        pieces,
        mesh=settings.mesh,
        axis=axis,
        schedule=settings.pipeline_schedule,  # pyright: ignore[reportArgumentType]  checked there
        first_fn=first,
        has_aux=True,
    )
    # The pipeline returns means over micro-batches.
    count = settings.microbatches
    summed = jax.tree.map(lambda leaf: leaf * count, _join(params, gradients))
    return StepResult(
        loss=mean * count,
        weight=weight,
        gradients=summed,
        model_state=variables.model_state,
        router=router,
    )


def _join(params: dict[str, PyTree], gradients: PipelineParams) -> dict[str, Any]:
    joined: dict[str, PyTree] = {"layers": join_stages(gradients.stages)}
    for part in (gradients.first, gradients.last):
        for name, gradient in part.items():
            if name == "layers":
                joined[name] = gradient | joined[name]
            # Embeddings that are tied, or used by multi-token prediction, are in both parts.
            elif name in joined:
                joined[name] = jax.tree.map(jnp.add, joined[name], gradient)
            else:
                joined[name] = gradient
    return {name: joined[name] for name in params}


def _split_layers(
    layers: PyTree, config: TransformerConfig, leading: tuple[str, ...]
) -> tuple[dict[str, Any], Any]:
    """Return the stacks of layers before the first stage, and the stacks that stages share."""
    if not leading:
        return {}, layers
    first = {name for name, kinds in kinds_of_stacks(config).items() if {*kinds} & {*leading}}
    before = {name: stack for name, stack in layers.items() if name in first}
    return {"layers": before}, {name: stack for name, stack in layers.items() if name not in first}


def _last_names(config: TransformerConfig) -> tuple[str, ...]:
    return (*_LAST, "embed") if config.tied_embeddings or config.mtp_layers else _LAST


def check_stages(config: TransformerConfig, mesh: AnyMesh, strategy: str) -> None:
    """Check that the layers can be split into the pipeline stages of a mesh, if it has any.

    Raises:
        ShardingError: The stages would not all have the same kinds of layers.
    """
    axis = find_axis(mesh, strategy, "pipeline")
    if axis is not None and axis_sizes(mesh)[axis] > 1:
        _cut(config, axis_sizes(mesh)[axis])


def _cut(config: TransformerConfig, stages: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the kinds of the layers before the first stage, and of the layers of every stage.

    All stages have the same kinds in the same order. Other layers at the start (dense ones before
    the MoE layers) run together with the embedding, replicated on all stages.

    Raises:
        ShardingError: The layers cannot be split that way.
    """
    if config.per_layer_width or config.key_donors:
        raise ShardingError(
            f"layers of '{config.name}' read embeddings or keys of other layers, which a pipeline "
            "does not pass between stages; use a mesh without a pipeline axis."
        )
    order = config.layer_order
    found = _pieces(config, stages)
    if found is not None:
        return found
    if len(set(order)) == 1:
        return (), order[: config.n_layers // stages]  # `split_stages` raises the error
    others = [n for n in range(2, config.n_layers + 1) if _pieces(config, n) is not None]
    fix = (
        f"use a pipeline of {', '.join(map(str, others))} stages"
        if others
        else "use a mesh without a pipeline axis"
    )
    raise ShardingError(
        f"'{config.name}' has {config.n_layers} layers in the pattern '{config.layer_pattern}', "
        f"but {stages} stages would not all have the same kinds in the same order; {fix}."
    )


def _pieces(
    config: TransformerConfig, stages: int
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the result of `_cut`, or None where stages would differ."""
    order = config.layer_order
    stack_of = {kind: name for name, kinds in kinds_of_stacks(config).items() for kind in kinds}
    first = stack_of[order[0]]
    start = next((n for n, kind in enumerate(order) if stack_of[kind] != first), 0)
    alone = start and all(stack_of[kind] != first for kind in order[start:])
    for leading in (0, start) if alone else (0,):
        each, left = divmod(config.n_layers - leading, stages)
        rest = order[leading:]
        if each and not left and rest == rest[:each] * stages:
            return order[:leading], rest[:each]
    return None
