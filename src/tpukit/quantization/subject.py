"""The model that is quantized: anybody's, as one function of its parameters and a batch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import TPUModelError, TPUValidationError
from ..models.adapters import ModelAdapter, TransformerAdapter, Variables, adapt
from ..models.adapters.functions import FunctionAdapter
from ..models.execution import Execution
from ..models.transformer.config import TransformerConfig
from ..models.transformer.layer_config import LayerConfig
from ..runtime.user_code import errors_in_trace

_KEY = 0  # of layers that draw numbers; the same for every call, so that outputs can be compared


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with its parameters apart.

    Attributes:
        adapter: What calls it.
        params: Its parameters.
        model_state: What else it carries.
        config: Of a reference transformer; None for other models.
        takes_batches: Whether it is called with the batch as it is, as plain functions are.
    """

    adapter: ModelAdapter
    params: Any
    model_state: Any
    config: TransformerConfig | None
    takes_batches: bool

    def apply(self, params: Any, batch: Any) -> Any:
        """What the model makes of a batch."""
        with errors_in_trace("the model"):
            if isinstance(self.adapter, FunctionAdapter) and self.takes_batches:
                return self.adapter.apply_function(params, batch)
            applied = self.adapter.apply(
                Variables(params, self.model_state),
                # Targets are for measuring: a model that saw them would give its loss.
                {name: value for name, value in batch.items() if name != "targets"},
                rng=jax.random.key(_KEY),
                execution=self._execution(),
            )
            return applied.outputs

    def _execution(self) -> Execution:
        # Layers of a loop share a program, and a matrix is rounded there in a way that hides it;
        # see `models.transformer.rounding`.
        config = self.config
        same = config is None or config.param_dtype == config.dtype
        return Execution(scan_layers=same)

    def batch(self, given: Any) -> Any:
        """A batch in the form that `apply` takes."""
        if isinstance(self.adapter, FunctionAdapter) and self.takes_batches:
            return jax.tree.map(jnp.asarray, given)
        return as_batch(given)

    def inputs(self, arguments: Sequence[Any]) -> Any:
        """A batch of what a model is called with."""
        if isinstance(self.adapter, FunctionAdapter) and self.takes_batches:
            return arguments[0]
        return as_batch(arguments[0])


def as_batch(given: Any) -> dict[str, jax.Array]:
    """A batch by names: an array is `inputs`, a pair (inputs, targets).

    Raises:
        TPUValidationError: It is neither, nor a mapping.
    """
    if isinstance(given, Mapping):
        found: dict[str, Any] = dict(given)  # pyright: ignore[reportUnknownArgumentType]
        return {name: jnp.asarray(value) for name, value in found.items()}
    if isinstance(given, tuple | list) and len(given) == 2:  # pyright: ignore[reportUnknownArgumentType]
        return {"inputs": jnp.asarray(given[0]), "targets": jnp.asarray(given[1])}
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        return {"inputs": jnp.asarray(given)}
    raise TPUValidationError(
        f"a batch of calibration data is a {type(given).__name__}; expected an array, a pair "
        "(inputs, targets), or a mapping of names to arrays."
    )


def make_subject(model: Any, params: Any, example: Any) -> Subject:
    """The model ready for calls.

    Args:
        model: What `tpukit.models` adapts: an nnx or equinox module, a linen module, a pair
            (init, apply), a `TransformerConfig` or a preset's name.
        params: Its parameters, where the model does not hold them.
        example: One batch of data.

    Raises:
        TPUModelError: Nobody knows the model, or its parameters are missing.
    """
    plain = type(model) in (tuple, list) and len(model) == 2
    batch: dict[str, Any] = {} if plain else as_batch(example)
    names = [name for name in batch if name != "targets"] or ["inputs"]
    shapes = {name: jax.ShapeDtypeStruct(one.shape, one.dtype) for name, one in batch.items()}
    adapter = adapt(model, inputs=names, batch_shapes=shapes)
    if adapter.initialised:
        own = adapter.init(jax.random.key(0))
        variables = Variables(own.params if params is None else params, own.model_state)
    elif params is None:
        raise TPUModelError(
            f"{type(model).__name__} holds no parameters of its own; pass them: "
            "quantize_model(model, data, params=…)."
        )
    else:
        variables = _with_state(adapter, params)
    config = adapter.config if isinstance(adapter, TransformerAdapter) else None
    if config is not None:
        adapter = TransformerAdapter(_experts_side_by_side(config))
    return Subject(adapter, variables.params, variables.model_state, config, plain)


def _experts_side_by_side(config: TransformerConfig) -> TransformerConfig:
    """The same model with the products of all experts in one, where each is seen by itself.

    Room for every token with every expert: nothing is dropped, so outputs stay.
    """

    def changes(layer: LayerConfig) -> dict[str, Any]:
        if not layer.n_experts or layer.routing != "dropless":
            return {}
        room = layer.n_experts / layer.experts_per_token
        return {"routing": "capacity", "capacity_factor": room}

    if not config.layer_kinds:
        return config.replace(**changes(config))
    kinds = {
        name: {**own, **changes(config.kinds[name])} for name, own in config.layer_kinds.items()
    }
    return config.replace(layer_kinds=kinds)


def _with_state(adapter: ModelAdapter, params: Any) -> Variables:
    """Parameters, and the state of models that are given both as one tree."""
    if isinstance(params, Variables):
        return params
    linen = isinstance(params, Mapping) and "params" in params
    if linen and type(adapter).__name__ == "LinenAdapter":
        rest = {name: tree for name, tree in params.items() if name != "params"}
        return Variables(params["params"], rest)
    return Variables(params, {})


def read_batches(data: Any, count: int, take: Callable[[Any], Any]) -> list[Any]:
    """At most `count` batches of calibration data.

    Raises:
        TPUValidationError: There are none.
    """
    single = isinstance(data, Mapping) or hasattr(data, "shape")
    source: Iterable[Any] = [data] if single else data
    found = [take(batch) for batch in islice(source, count)]
    if not found:
        raise TPUValidationError(
            "there is no calibration data: expected at least one batch of inputs."
        )
    return found


def held_out(batches: Sequence[Any], most: int | None = None) -> tuple[list[Any], list[Any]]:
    """(to calibrate with, to measure on): the last quarter is held out, or half of one batch.

    Of the quarter `most` batches at most, where that is given.
    """
    if len(batches) > 1:
        quarter = max(1, len(batches) // 4)
        cut = len(batches) - (quarter if most is None else min(quarter, most))
        return list(batches[:cut]), list(batches[cut:])
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batches[0]) if leaf.ndim}
    half = min(rows) // 2 if rows else 0
    if not half:
        raise TPUValidationError(
            "there is one batch of one row, and nothing to measure on: give more rows or batches, "
            "or evaluation_data=…."
        )
    parts = (slice(None, half), slice(half, None))
    first, second = (jax.tree.map(lambda leaf, part=part: leaf[part], batches[0]) for part in parts)
    return [first], [second]
