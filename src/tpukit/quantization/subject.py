"""`Subject`: the model to quantize, as one function of its parameters and a batch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp

from ..annotations import PyTree
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
    """A model, separate from its parameters.

    Attributes:
        adapter: The adapter that calls it.
        params: Its parameters.
        model_state: Its state besides parameters.
        config: The configuration of a reference transformer; None for other models.
        takes_batches: Whether it is called with the unchanged batch, as plain functions are.
    """

    adapter: ModelAdapter
    params: PyTree
    model_state: PyTree
    config: TransformerConfig | None
    takes_batches: bool

    def apply(self, params: PyTree, batch: PyTree) -> PyTree:
        """Run the model on a batch."""
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

    def batch(self, given: PyTree) -> PyTree:
        """Return a batch in the form that `apply` takes."""
        if isinstance(self.adapter, FunctionAdapter) and self.takes_batches:
            return jax.tree.map(jnp.asarray, given)
        return as_batch(given)

    def inputs(self, arguments: Sequence[PyTree]) -> PyTree:
        """Return the model's inputs as a batch."""
        if isinstance(self.adapter, FunctionAdapter) and self.takes_batches:
            return arguments[0]
        return as_batch(arguments[0])


def as_batch(given: PyTree) -> dict[str, jax.Array]:
    """Return a batch as a mapping; an array becomes `inputs`, a pair `inputs` and `targets`.

    Raises:
        TPUValidationError: The batch has another type.
    """
    if isinstance(given, Mapping):
        batch: dict[str, Any] = dict(given)  # pyright: ignore[reportUnknownArgumentType]
        return {name: jnp.asarray(value) for name, value in batch.items()}
    if isinstance(given, tuple | list) and len(given) == 2:  # pyright: ignore[reportUnknownArgumentType]
        return {"inputs": jnp.asarray(given[0]), "targets": jnp.asarray(given[1])}
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        return {"inputs": jnp.asarray(given)}
    raise TPUValidationError(
        f"a batch of calibration data is a {type(given).__name__}; expected an array, a pair "
        "(inputs, targets), or a mapping of names to arrays."
    )


def make_subject(model: Any, params: PyTree, example: PyTree) -> Subject:
    """Build a subject from a model of any kind.

    Args:
        model: A model that `tpukit.models` adapts: an nnx or equinox module, a linen module, a pair
            (init, apply), a `TransformerConfig` or a preset's name.
        params: Its parameters, if the model does not contain them.
        example: One batch of data.

    Raises:
        TPUModelError: The kind of model is unknown, or its parameters are missing.
    """
    plain = type(model) in (tuple, list) and len(model) == 2
    batch: dict[str, Any] = {} if plain else as_batch(example)
    names = [name for name in batch if name != "targets"] or ["inputs"]
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}
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
    """Return the model with one matmul over all experts, in which each expert's inputs are seen.

    The capacity is every token per expert, so no token is dropped and outputs stay.
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


def _with_state(adapter: ModelAdapter, params: PyTree) -> Variables:
    """Split a tree into parameters and model state."""
    if isinstance(params, Variables):
        return params
    linen = isinstance(params, Mapping) and "params" in params
    if linen and type(adapter).__name__ == "LinenAdapter":
        rest = {name: tree for name, tree in params.items() if name != "params"}
        return Variables(params["params"], rest)
    return Variables(params, {})


def read_batches(data: Any, count: int, take: Callable[[PyTree], PyTree]) -> list[PyTree]:
    """Read up to `count` batches of calibration data.

    Raises:
        TPUValidationError: There are no batches.
    """
    single = isinstance(data, Mapping) or hasattr(data, "shape")
    source: Iterable[PyTree] = [data] if single else data
    batches = [take(batch) for batch in islice(source, count)]
    if not batches:
        raise TPUValidationError(
            "there is no calibration data: expected at least one batch of inputs."
        )
    return batches


def held_out(
    batches: Sequence[PyTree], most: int | None = None
) -> tuple[list[PyTree], list[PyTree]]:
    """Split data into (calibration, held out): the last quarter, or half of a single batch.

    `most` limits the number of held-out batches.
    """
    if len(batches) > 1:
        quarter = max(1, len(batches) // 4)
        cut = len(batches) - (quarter if most is None else min(quarter, most))
        return list(batches[:cut]), list(batches[cut:])
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batches[0]) if leaf.ndim}
    half = min(rows) // 2 if rows else 0
    if not half:
        raise TPUValidationError(
            "one batch of one row leaves nothing to measure on; give more rows or batches, "
            "or evaluation_data=…."
        )
    parts = (slice(None, half), slice(half, None))
    first, second = (jax.tree.map(lambda leaf, part=part: leaf[part], batches[0]) for part in parts)
    return [first], [second]
