"""Loss and gradients of a step whose layers are spread over pipeline stages."""

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ShardingError, TPUModelError
from ..models.adapters import TransformerAdapter, Variables
from ..models.loss.loss import Batch
from ..models.transformer.config import TransformerConfig
from ..parallel.experts.routing import RouterStats
from ..parallel.pipelining.forward import (
    PipelineParams,
    join_stages,
    split_microbatches,
    split_stages,
)
from ..parallel.pipelining.gradient import pipeline_value_and_grad
from .parts import StepResult, StepSettings, weighted_loss

_FIRST = ("embed", "position_embed")
_LAST = ("final_norm", "lm_head")


def pipeline_loss_and_gradients(
    settings: StepSettings, variables: Variables, batch: Batch, *, axis: str, stages: int
) -> StepResult:
    """The sum of losses and its gradients, micro-batches flowing through the stages on `axis`.

    Like the other ways of computing a step, `loss` and `gradients` are not yet divided by
    `weight`.
    """
    adapter = settings.adapter
    if not isinstance(adapter, TransformerAdapter):
        raise TPUModelError(
            "the pipeline strategy has to know where a model's layers are, which it does for the "
            "reference transformer; for your own model call "
            "tpukit.parallel.pipeline_value_and_grad with its stages."
        )
    _check_pattern(adapter.config, stages)
    config, execution = adapter.config, settings.execution

    def first(params: Any, piece: Batch) -> dict[str, Any]:
        model = adapter.module(params, execution)
        tokens = piece["inputs"]
        context = model.context(tokens.shape, positions=piece.get("positions"))
        carried: dict[str, Any] = {
            "x": model.embed_tokens(tokens, piece.get("positions")),
            "positions": context.positions,
        }
        if "segment_ids" in piece:
            carried["segment_ids"] = piece["segment_ids"]
        if config.has_experts:
            wide = jnp.promote_types(config.dtype, jnp.float32)
            carried["router"] = RouterStats.zeros(config.most_experts, wide)
        return carried

    def stage(layers: Any, carried: dict[str, Any]) -> dict[str, Any]:
        model = adapter.module({"layers": layers}, execution)
        context = model.context(
            carried["positions"].shape,
            positions=carried["positions"],
            segment_ids=carried.get("segment_ids"),
        )
        x, router = model.run_stack(adapter.layer_state(layers), carried["x"], context)
        new = {**carried, "x": x}
        if router is not None:
            new["router"] = carried["router"] + router
        return new

    def last(params: Any, carried: dict[str, Any], piece: Batch) -> tuple[jax.Array, Any]:
        outputs = adapter.read_out(adapter.module(params, execution), carried["x"], piece)
        loss = weighted_loss(settings.loss, outputs, piece, z_loss=execution.z_loss)
        router = carried.get("router")
        penalty = adapter.penalty(router)
        total = loss.total
        if penalty is not None:
            total = total + (penalty * loss.weight).astype(total.dtype)
        return total, (loss.weight, router)

    params = variables.params
    parts = PipelineParams(
        first={name: params[name] for name in _FIRST if name in params},
        stages=split_stages(params["layers"], stages),
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


def _join(params: dict[str, Any], gradients: PipelineParams) -> dict[str, Any]:
    joined: dict[str, Any] = {"layers": join_stages(gradients.stages)}
    for part in (gradients.first, gradients.last):
        for name, gradient in part.items():
            # Tied embeddings are in the first part and in the last.
            joined[name] = (
                jax.tree.map(jnp.add, joined[name], gradient) if name in joined else gradient
            )
    return {name: joined[name] for name in params}


def _last_names(config: TransformerConfig) -> tuple[str, ...]:
    return (*_LAST, "embed") if config.tied_embeddings else _LAST


def _check_pattern(config: TransformerConfig, stages: int) -> None:
    """Raise where stages would not all hold the same kinds of layers in the same order."""
    if config.per_layer_width or config.key_donors:
        raise ShardingError(
            f"layers of '{config.name}' read embeddings or keys that other stages have; use a "
            "mesh without a pipeline axis."
        )
    each = config.n_layers // stages
    order = config.layer_order
    held = {order[stage * each : (stage + 1) * each] for stage in range(stages)}
    if config.n_layers % stages == 0 and len(held) > 1:
        raise ShardingError(
            f"'{config.name}' has layers in the pattern '{config.layer_pattern}', and {stages} "
            f"stages of {each} layers would not all hold the same; use a number of stages that "
            "keeps whole patterns."
        )
