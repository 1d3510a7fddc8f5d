"""One step, whole, in accumulated micro-batches, or through a pipeline: gradients, new state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..models.adapters import Variables
from ..models.loss.loss import Batch
from ..parallel.mesh.mesh import axis_sizes
from ..parallel.pipelining.forward import split_microbatches
from ..parallel.sharding.strategy import find_axis
from .parts import StepResult, StepSettings, TrainState, weighted_loss
from .pipeline import pipeline_loss_and_gradients


def updated_state(
    settings: StepSettings,
    transformation: optax.GradientTransformation,
    state: TrainState,
    batch: Batch,
    rng: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after one step, and what the step measured."""
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
    """The mean loss over the whole batch and its gradients, however the batch is cut."""
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
    """Totals of one piece: `loss` and `gradients` are not yet divided by `weight`."""

    def total(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any, Any]]:
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
    # A batch with every label masked has nothing to learn from, not NaN to spread.
    weight = jnp.maximum(total.weight, jnp.finfo(total.weight.dtype).tiny)
    return StepResult(
        loss=total.loss / weight,
        weight=total.weight,
        gradients=jax.tree.map(lambda leaf: (leaf / weight).astype(leaf.dtype), total.gradients),
        model_state=total.model_state,
        router=total.router,
    )
