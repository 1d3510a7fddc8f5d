"""The adapter of reference transformers, from a preset's name or a configuration."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx

from ...annotations import PyTree
from ...errors import TPUModelError
from ...parallel.experts.routing import RouterStats
from ..execution import Execution
from ..loss import (
    Batch,
    TokenSplit,
    WeightedLoss,
    chunked_next_token_loss,
    count_chunks,
    default_loss,
    token_targets,
)
from ..presets import get_preset
from ..remat.policy import RematPolicy
from ..transformer.config import TransformerConfig
from ..transformer.model import Transformer
from .kind import ModelKind
from .protocol import Applied, ModelInputs, Variables


@dataclass(frozen=True)
class TransformerAdapter:
    """The reference transformer; its parameters are a plain nested dict."""

    config: TransformerConfig
    initialised: bool = False

    @property
    def head_counts(self) -> dict[str, int]:
        """Heads of queries, and of keys and values, that divide those of every kind of layer."""
        heads: list[int] = []
        kv_heads: list[int] = []
        for layer in self.config.kinds.values():
            if layer.delta is not None:
                heads.append(layer.delta.key_heads)
                kv_heads.append(layer.delta.key_heads)
            else:
                heads.append(layer.n_heads)
                kv_heads.append(layer.n_heads if layer.latent else layer.n_kv_heads)
        return {"heads": math.gcd(*heads), "kv_heads": math.gcd(*kv_heads)}

    def init(self, rng: jax.Array) -> Variables:
        """Return new parameters."""
        model = Transformer(self.config, rngs=nnx.Rngs(params=rng))
        return Variables(nnx.to_pure_dict(nnx.state(model, nnx.Param)), {})

    def module(self, params: PyTree, execution: Execution) -> Transformer:
        """Return the nnx module that holds `params`."""
        empty = nnx.eval_shape(lambda: Transformer(self.config, rngs=nnx.Rngs(0)))
        definition, state = nnx.split(empty)
        nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, params))
        model = nnx.merge(definition, state)
        model.execution = execution
        return model

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Return logits of `batch["inputs"]`; `positions` and `segment_ids` are optional."""
        model = self.module(variables.params, execution)
        x, router = model.hidden(
            batch["inputs"],
            positions=batch.get("positions"),
            segment_ids=batch.get("segment_ids"),
        )
        read = self.read_out(model, x, batch, router)
        return Applied(read.outputs, variables.model_state, read.router, read.penalty)

    def read_out(
        self, model: Transformer, x: jax.Array, batch: Batch, router: RouterStats | None
    ) -> "ReadOut":
        """Return logits or loss, router statistics and loss terms of the last layer's output.

        Args:
            model: The module.
            x: (B, S, d_model) the output of the last layer.
            batch: The batch.
            router: The router statistics of the layers.
        """
        targets = token_targets(batch, x.shape[:2])
        normed = model.final_norm(x)
        outputs = _read_out(model, normed, targets)
        further = None
        if model.mtp is not None and targets is not None:
            further, seen = _loss_of_predictions(model, normed, targets, batch)
            router = seen if router is None or seen is None else router + seen
        return ReadOut(outputs, router, self._penalty(router, further))

    def layer_state(self, layers: Any) -> Any:
        """Return parameters of layers as the nnx state that the module scans over."""
        empty = nnx.eval_shape(lambda: Transformer(self.config, rngs=nnx.Rngs(0)))
        state = nnx.state(empty.layers)
        nnx.replace_by_pure_dict(state, layers)
        return state

    def _penalty(self, router: RouterStats | None, further: jax.Array | None) -> jax.Array | None:
        """Return the loss terms of router balance and multi-token prediction, or None."""
        weight = self.config.router_balance_weight
        uneven = None if router is None or not weight else weight * router.balance_loss
        if further is None:
            return uneven
        weighed = self.config.mtp_weight / self.config.mtp_layers * further
        return weighed if uneven is None else weighed + uneven


class ReadOut(NamedTuple):
    """The outputs of a model after its last layer.

    Attributes:
        outputs: Logits, or the chunked loss where logits would be too large.
        router: The statistics of all routers.
        penalty: A term that is added to the mean loss.
    """

    outputs: jax.Array | WeightedLoss
    router: RouterStats | None
    penalty: jax.Array | None


def _read_out(
    model: Transformer, normed: jax.Array, targets: jax.Array | None
) -> jax.Array | WeightedLoss:
    """Return logits of normed activations, or the chunked loss where they would be too large."""
    wanted = model.execution.loss_chunks
    if targets is not None and wanted is not None:
        head = model.head()
        if callable(wanted) and model.config.logit_soft_cap is None:
            return wanted(normed, head, targets)
        wanted = "auto" if callable(wanted) else wanted  # functions do not support a soft cap
        shape = (*normed.shape[:2], head.shape[-1])
        split = TokenSplit.of(shape)
        if count_chunks(wanted, shape, itemsize=head.dtype.itemsize, split=split) > 1:
            return chunked_next_token_loss(
                normed,
                head,
                targets,
                chunks=wanted,
                z_loss=model.execution.z_loss,
                soft_cap=model.config.logit_soft_cap,
                frozen=model.execution.frozen_head,
            )
    return model.logits(normed)


def _loss_of_predictions(
    model: Transformer, normed: jax.Array, targets: jax.Array, batch: Batch
) -> tuple[jax.Array, RouterStats | None]:
    """Return the summed losses of all depths per counted token, and their router statistics.

    The divisor is that of the model's own loss, so that micro-batches add up to the full batch.
    """
    assert model.mtp is not None
    positions, segments = batch.get("positions"), batch.get("segment_ids")
    context = model.context(targets.shape, positions=positions, segment_ids=segments)
    predictions = model.mtp(
        normed,
        batch["inputs"],
        targets,
        context,
        segment_ids=segments,
        embed=model.embed_tokens,
    )
    total, router = jnp.zeros((), jnp.promote_types(normed.dtype, jnp.float32)), None
    for made in predictions:
        outputs = _read_out(model, made.normed, made.targets)
        loss = default_loss(outputs, {"targets": made.targets}, z_loss=model.execution.z_loss)
        assert isinstance(loss, WeightedLoss)
        total = total + loss.total
        router = made.router if router is None or made.router is None else router + made.router
    return total / jnp.maximum(1, jnp.sum(targets >= 0)), router


def _build(model: str | TransformerConfig, inputs: ModelInputs) -> TransformerAdapter:
    return TransformerAdapter(get_preset(model) if isinstance(model, str) else model)


def _refuse_checkpoints(model: str | TransformerConfig, remat: RematPolicy) -> NoReturn:
    raise TPUModelError(
        "a preset or a configuration has no function to checkpoint; use Workload(model, "
        f"remat='{remat}', …)."
    )


REFERENCE_TRANSFORMER = ModelKind(
    name="reference transformer",
    accepts="a preset name or a TransformerConfig",
    recognises=lambda model: isinstance(model, str | TransformerConfig),
    build=_build,
    checkpoint=_refuse_checkpoints,
)
