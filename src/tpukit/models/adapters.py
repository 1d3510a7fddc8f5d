"""One small protocol that every kind of JAX model obeys: nothing else asks what kind it is."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.core import meta

from ..errors import TPUModelError
from ..parallel.experts.routing import RouterStats
from .execution import Execution
from .loss.chunked import TokenSplit, chunked_next_token_loss, count_chunks
from .loss.loss import Batch, WeightedLoss, token_targets
from .presets import get_preset
from .remat.gradient_checkpointing import checkpoint_layers
from .transformer.config import TransformerConfig
from .transformer.model import Transformer


class Variables(NamedTuple):
    """What a model owns: `params` are trained, `model_state` (batch statistics …) is carried."""

    params: Any
    model_state: Any


class Applied(NamedTuple):
    """What a model gave: outputs, its new state, and what its routers did and cost (MoE)."""

    outputs: Any
    model_state: Any
    router: RouterStats | None = None
    penalty: jax.Array | None = None


class ModelAdapter(Protocol):
    """What a workload needs from a model, whatever it is written in."""

    @property
    def initialised(self) -> bool:
        """True when `init` returns arrays that exist already instead of making new ones."""
        ...

    def init(self, rng: jax.Array) -> Variables:
        """New variables; a pure function that can be traced."""
        ...

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Run the model on a batch."""
        ...


@dataclass(frozen=True)
class TransformerAdapter:
    """The reference transformer; its parameters are a plain nested dict."""

    config: TransformerConfig
    initialised: bool = False

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
            if callable(wanted):
                return wanted(model.final_norm(x), head, targets)
            shape = (*x.shape[:2], head.shape[-1])
            split = TokenSplit.of(shape)
            if count_chunks(wanted, shape, itemsize=head.dtype.itemsize, split=split) > 1:
                normed = model.final_norm(x)
                return chunked_next_token_loss(
                    normed, head, targets, chunks=wanted, z_loss=model.execution.z_loss
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


@dataclass(frozen=True)
class NnxAdapter:
    """A flax nnx module, or a function that makes one from `nnx.Rngs`."""

    model: Any
    inputs: tuple[str, ...]

    @property
    def initialised(self) -> bool:
        """A module that was handed over keeps the values it has."""
        return isinstance(self.model, nnx.Module)

    def init(self, rng: jax.Array) -> Variables:
        """The module's own variables, or new ones from the factory."""
        model = self.model if self.initialised else self.model(nnx.Rngs(rng))
        if not isinstance(model, nnx.Module):
            raise TPUModelError(
                f"the model function returned {type(model).__name__}, not a flax nnx module; "
                "for plain functions pass the pair (init, apply)."
            )
        _, params, rest = nnx.split(model, nnx.Param, ...)
        return _copy(Variables(nnx.to_pure_dict(params), nnx.to_pure_dict(rest)))

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Call the module on the batch entries named by `inputs`."""

        def make() -> Any:
            return self.model if self.initialised else self.model(nnx.Rngs(0))

        definition, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
        nnx.replace_by_pure_dict(params, variables.params)
        nnx.replace_by_pure_dict(rest, variables.model_state)
        model = nnx.merge(definition, params, rest)
        outputs = checkpoint_layers(model, execution.remat)(*_pick(batch, self.inputs))
        _, _, rest = nnx.split(model, nnx.Param, ...)
        return Applied(outputs, nnx.to_pure_dict(rest))


@dataclass(frozen=True)
class LinenAdapter:
    """A flax linen module; `batch_stats` and the like are carried as `model_state`."""

    model: Any
    inputs: tuple[str, ...]
    batch_shapes: Mapping[str, jax.ShapeDtypeStruct]
    initialised: bool = False

    def init(self, rng: jax.Array) -> Variables:
        """New variables, made by calling the module on zeros."""
        examples = {
            name: jnp.zeros(shape.shape, shape.dtype) for name, shape in self.batch_shapes.items()
        }
        rngs = {"params": rng, "dropout": jax.random.fold_in(rng, 1)}
        variables = dict(meta.unbox(self.model.init(rngs, *_pick(examples, self.inputs))))
        return Variables(variables.pop("params", {}), variables)

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Apply the module to the batch entries named by `inputs`."""
        outputs, changed = checkpoint_layers(self.model, execution.remat).apply(
            {"params": variables.params, **variables.model_state},
            *_pick(batch, self.inputs),
            rngs={"dropout": rng},
            mutable=list(variables.model_state),
        )
        return Applied(outputs, {**variables.model_state, **changed})


@dataclass(frozen=True)
class EquinoxAdapter:
    """An equinox module, called on one example at a time (equinox's convention) under vmap."""

    model: Any
    inputs: tuple[str, ...]
    initialised: bool = True

    def init(self, rng: jax.Array) -> Variables:
        """The module's own arrays."""
        import equinox

        return _copy(Variables(equinox.filter(self.model, equinox.is_inexact_array), {}))

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Call the module on every example."""
        import equinox

        static = equinox.filter(self.model, equinox.is_inexact_array, inverse=True)
        model = equinox.combine(variables.params, static)
        call = execution.remat.wrap(jax.vmap(model))
        return Applied(call(*_pick(batch, self.inputs)), variables.model_state)


@dataclass(frozen=True)
class FunctionAdapter:
    """A pair of plain functions: `init(rng) -> params` and `apply(params, batch) -> outputs`."""

    init_function: Callable[[jax.Array], Any]
    apply_function: Callable[[Any, Batch], Any]
    initialised: bool = False

    def init(self, rng: jax.Array) -> Variables:
        """New parameters."""
        return Variables(self.init_function(rng), {})

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Apply the function to the whole batch."""
        call = execution.remat.wrap(self.apply_function)
        return Applied(call(variables.params, batch), variables.model_state)


def adapt(
    model: Any, *, inputs: Sequence[str], batch_shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> ModelAdapter:
    """The adapter for `model`: the one place that asks what kind of model it is."""
    names = tuple(inputs)
    if isinstance(model, str):
        return TransformerAdapter(get_preset(model))
    if isinstance(model, TransformerConfig):
        return TransformerAdapter(model)
    if isinstance(model, Sequence):
        pair: Sequence[Any] = model
        if len(pair) == 2 and all(callable(part) for part in pair):
            return FunctionAdapter(pair[0], pair[1])
    if isinstance(model, linen.Module):
        return LinenAdapter(model, names, dict(batch_shapes))
    # Whoever hands over an equinox module has imported equinox; nobody else has to install it.
    if "equinox" in sys.modules and isinstance(model, sys.modules["equinox"].Module):
        return EquinoxAdapter(model, names)
    if callable(model):
        return NnxAdapter(model, names)
    raise TPUModelError(
        f"{type(model).__name__} is not a model; pass a preset name, a TransformerConfig, a flax "
        "nnx, flax linen or equinox module, a function that makes an nnx module from nnx.Rngs, or "
        "a pair (init, apply)."
    )


def _copy(variables: Variables) -> Variables:
    # A step donates its state; without copies it would delete the arrays of the user's own model.
    return jax.tree.map(lambda leaf: leaf.copy(), variables)


def _pick(batch: Batch, names: tuple[str, ...]) -> list[Any]:
    missing = [name for name in names if name not in batch]
    if missing:
        raise TPUModelError(
            f"the batch has {', '.join(sorted(batch))} but the model reads '{missing[0]}'; "
            "name the entries it is called with: Workload(..., inputs=(…,))."
        )
    return [batch[name] for name in names]
