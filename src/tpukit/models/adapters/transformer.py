"""The reference transformer, named by a preset or described by a configuration."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx

from ...errors import TPUModelError
from ...parallel.experts.routing import RouterStats
from ..execution import Execution
from ..loss.chunked import TokenSplit, chunked_next_token_loss, count_chunks
from ..loss.loss import Batch, WeightedLoss, default_loss, token_targets
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
        """Heads of queries, and of keys and values, that every kind of layer can be split by."""
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
        """New parameters."""
        model = Transformer(self.config, rngs=nnx.Rngs(params=rng))
        return Variables(nnx.to_pure_dict(nnx.state(model, nnx.Param)), {})

    def module(self, params: Any, execution: Execution) -> Transformer:
        """The nnx module that holds `params`."""
        empty = nnx.eval_shape(lambda: Transformer(self.config, rngs=nnx.Rngs(0)))
        definition, state = nnx.split(empty)
        nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, params))
        model = nnx.merge(definition, state)
        model.execution = execution
        return model

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Logits for `batch["inputs"]`; `positions` and `segment_ids` are read if present."""
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
        """What the last layer's output `x` comes to.

        Args:
            model: The module.
            x: (B, S, d_model).
            batch: What it was computed from.
            router: What the decoder's routers did.
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
        """Some layers' parameters in the form the module scans over."""
        empty = nnx.eval_shape(lambda: Transformer(self.config, rngs=nnx.Rngs(0)))
        state = nnx.state(empty.layers)
        nnx.replace_by_pure_dict(state, layers)
        return state

    def _penalty(self, router: RouterStats | None, further: jax.Array | None) -> jax.Array | None:
        """What uneven routers and further predictions add to the mean loss."""
        weight = self.config.router_balance_weight
        uneven = None if router is None or not weight else weight * router.balance_loss
        if further is None:
            return uneven
        weighed = self.config.mtp_weight / self.config.mtp_layers * further
        return weighed if uneven is None else weighed + uneven


class ReadOut(NamedTuple):
    """What a model's last layer comes to.

    Attributes:
        outputs: Logits, or their loss where they are too many to hold.
        router: What all routers did.
        penalty: What is added to the mean loss.
    """

    outputs: jax.Array | WeightedLoss
    router: RouterStats | None
    penalty: jax.Array | None


def _read_out(
    model: Transformer, normed: jax.Array, targets: jax.Array | None
) -> jax.Array | WeightedLoss:
    """Logits of normed activations, or their loss where they are too many to hold."""
    wanted = model.execution.loss_chunks
    if targets is not None and wanted is not None:
        head = model.head()
        if callable(wanted) and model.config.logit_soft_cap is None:
            return wanted(normed, head, targets)
        wanted = "auto" if callable(wanted) else wanted  # which knows no cap
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
    """Losses of all depths over the number of tokens that count, added up, and their routers'.

    Divided by what the decoder's own loss is, so that micro-batches add up to the whole batch.
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
        "a preset or a configuration does not run by itself, so there is nothing to change in it; "
        f"write Workload(model, remat='{remat}', …)."
    )


REFERENCE_TRANSFORMER = ModelKind(
    name="reference transformer",
    accepts="a preset name or a TransformerConfig",
    recognises=lambda model: isinstance(model, str | TransformerConfig),
    build=_build,
    checkpoint=_refuse_checkpoints,
)
