"""The reference transformer, named by a preset or described by a configuration."""

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx

from ...errors import TPUModelError
from ...parallel.experts.routing import RouterStats
from ..execution import Execution
from ..loss.chunked import TokenSplit, chunked_next_token_loss, count_chunks
from ..loss.loss import Batch, WeightedLoss, token_targets
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
        outputs = self.read_out(model, x, batch)
        return Applied(outputs, variables.model_state, router, self.penalty(router))

    def read_out(self, model: Transformer, x: jax.Array, batch: Batch) -> jax.Array | WeightedLoss:
        """Logits of the last layer's output, or their loss where they are too many to hold."""
        targets, wanted = token_targets(batch, x.shape[:2]), model.execution.loss_chunks
        if targets is not None and wanted is not None:
            head = model.head()
            if callable(wanted) and model.config.logit_soft_cap is None:
                return wanted(model.final_norm(x), head, targets)
            wanted = "auto" if callable(wanted) else wanted  # which knows no cap
            shape = (*x.shape[:2], head.shape[-1])
            split = TokenSplit.of(shape)
            if count_chunks(wanted, shape, itemsize=head.dtype.itemsize, split=split) > 1:
                normed = model.final_norm(x)
                return chunked_next_token_loss(
                    normed,
                    head,
                    targets,
                    chunks=wanted,
                    z_loss=model.execution.z_loss,
                    soft_cap=model.config.logit_soft_cap,
                )
        return model.unembed(x)

    def layer_state(self, layers: Any) -> Any:
        """Some layers' parameters in the form the module scans over."""
        empty = nnx.eval_shape(lambda: Transformer(self.config, rngs=nnx.Rngs(0)))
        state = nnx.state(empty.layers)
        nnx.replace_by_pure_dict(state, layers)
        return state

    def penalty(self, router: RouterStats | None) -> jax.Array | None:
        """What uneven routers add to the mean loss."""
        if router is None or not self.config.router_balance_weight:
            return None
        return self.config.router_balance_weight * router.balance_loss


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
