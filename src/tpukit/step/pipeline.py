"""Loss and gradients of a step whose layers are spread over pipeline stages."""

from typing import Any

import jax
import jax.numpy as jnp

from ..annotations import AnyMesh
from ..errors import ShardingError, TPUModelError
from ..models.adapters import TransformerAdapter, Variables
from ..models.lora.adapter import LoraAdapter
from ..models.loss.loss import Batch
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
from .parts import StepResult, StepSettings, weighted_loss
from .placement import find_axis

_FIRST = ("embed", "position_embed")
_LAST = ("final_norm", "lm_head", "mtp")


def pipeline_loss_and_gradients(
    settings: StepSettings, variables: Variables, batch: Batch, *, axis: str, stages: int
) -> StepResult:
    """The sum of losses and its gradients, micro-batches flowing through the stages on `axis`.

    Like the other ways of computing a step, `loss` and `gradients` are not yet divided by
    `weight`.
    """
    adapter = settings.adapter
    if isinstance(adapter, LoraAdapter):
        raise TPUModelError(
            "the pipeline strategy trains whole layers, and lora thin matrices beside them; split "
            "the model with fsdp or megatron instead, or leave lora out."
        )
    if not isinstance(adapter, TransformerAdapter):
        raise TPUModelError(
            "the pipeline strategy has to know where a model's layers are, which it does for the "
            "reference transformer; for your own model call "
            "tpukit.parallel.pipeline_value_and_grad with its stages."
        )
    config, execution = adapter.config, settings.execution
    leading, each = _cut(config, stages)

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
        return run(params["layers"], carried, leading) if leading else carried

    def stage(layers: Any, carried: dict[str, Any]) -> dict[str, Any]:
        return run(layers, carried, each)

    def run(layers: Any, carried: dict[str, Any], order: tuple[str, ...]) -> dict[str, Any]:
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

    def last(params: Any, carried: dict[str, Any], piece: Batch) -> tuple[jax.Array, Any]:
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


def _join(params: dict[str, Any], gradients: PipelineParams) -> dict[str, Any]:
    joined: dict[str, Any] = {"layers": join_stages(gradients.stages)}
    for part in (gradients.first, gradients.last):
        for name, gradient in part.items():
            if name == "layers":
                joined[name] = gradient | joined[name]
            # Embeddings that are tied, or of tokens further on, are in both parts.
            elif name in joined:
                joined[name] = jax.tree.map(jnp.add, joined[name], gradient)
            else:
                joined[name] = gradient
    return {name: joined[name] for name in params}


def _split_layers(
    layers: Any, config: TransformerConfig, leading: tuple[str, ...]
) -> tuple[dict[str, Any], Any]:
    """The stacks of the layers that come before the stages, and those that the stages share."""
    if not leading:
        return {}, layers
    first = {name for name, kinds in kinds_of_stacks(config).items() if {*kinds} & {*leading}}
    before = {name: stack for name, stack in layers.items() if name in first}
    return {"layers": before}, {name: stack for name, stack in layers.items() if name not in first}


def _last_names(config: TransformerConfig) -> tuple[str, ...]:
    return (*_LAST, "embed") if config.tied_embeddings or config.mtp_layers else _LAST


def check_stages(config: TransformerConfig, mesh: AnyMesh, strategy: str) -> None:
    """Check that layers can be cut into the stages of a mesh, where its strategy has any.

    Raises:
        ShardingError: They cannot.
    """
    axis = find_axis(mesh, strategy, "pipeline")
    if axis is not None and axis_sizes(mesh)[axis] > 1:
        _cut(config, axis_sizes(mesh)[axis])


def _cut(config: TransformerConfig, stages: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kinds of the layers before the first stage, and of those that every stage holds.

    All stages hold the same kinds in the same order, so a stack of other layers at the start (the
    dense ones before the experts) runs with the embedding, on every stage alike.

    Raises:
        ShardingError: There are no such stages.
    """
    if config.per_layer_width or config.key_donors:
        raise ShardingError(
            f"layers of '{config.name}' read embeddings or keys that other stages have; use a "
            "mesh without a pipeline axis."
        )
    order = config.layer_order
    found = _pieces(config, stages)
    if found is not None:
        return found
    if len(set(order)) == 1:
        return (), order[: config.n_layers // stages]  # which `split_stages` refuses
    others = [n for n in range(2, config.n_layers + 1) if _pieces(config, n) is not None]
    way_out = (
        f"a pipeline of {', '.join(map(str, others))} would do"
        if others
        else "use a mesh without a pipeline axis"
    )
    raise ShardingError(
        f"'{config.name}' has {config.n_layers} layers in the pattern '{config.layer_pattern}', "
        f"and {stages} stages would not all hold the same ones in the same order; {way_out}."
    )


def _pieces(
    config: TransformerConfig, stages: int
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """What `_cut` returns, or None where stages would differ."""
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
