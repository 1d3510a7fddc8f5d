"""Mixed precision for user models: wide master weights, narrow compute, a wide loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..annotations import PyTree
from ..errors import TPUModelError
from ..hardware.formats import spelled_as
from ..models.adapters import Applied, ModelAdapter, TransformerAdapter, Variables, head_counts_of
from ..models.execution import Execution
from ..models.loss import Batch

FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class NarrowAdapter:
    """A model whose parameters and inputs are cast to `dtype` for each use.

    Gradients have the format of the master weights, outputs are cast to at least float32 for the
    loss, and carried state keeps its format. `param_dtype` is the format of the master weights.
    None for either leaves the model's own format.
    """

    inner: ModelAdapter
    dtype: Any
    param_dtype: Any

    @property
    def initialised(self) -> bool:
        """Whether the model's arrays exist already."""
        return self.inner.initialised

    @property
    def head_counts(self) -> Mapping[str, int] | None:
        """Numbers of heads, or None where the model's adapter has none."""
        return head_counts_of(self.inner)

    def init(self, rng: jax.Array) -> Variables:
        """Return the model's variables in the format of the master weights."""
        made = self.inner.init(rng)
        if self.param_dtype is None:
            return made
        return Variables(_cast(made.params, self.param_dtype), made.model_state)

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Run the model in `dtype`."""
        if self.dtype is None:
            return self.inner.apply(variables, batch, rng=rng, execution=execution)
        narrow = Variables(_cast(variables.params, self.dtype), variables.model_state)
        applied = self.inner.apply(
            narrow, _cast(dict(batch), self.dtype), rng=rng, execution=execution
        )
        state = jax.tree.map(
            lambda new, old: new.astype(old.dtype), applied.model_state, variables.model_state
        )
        outputs = _cast(applied.outputs, jnp.float32)
        return Applied(outputs, state, applied.router, applied.penalty)


def narrowed(
    adapter: ModelAdapter, dtype: str | None, param_dtype: str | None = None
) -> NarrowAdapter:
    """Return an adapter that computes in `dtype`, with master weights in `param_dtype`.

    Raises:
        TPUModelError: The model is a reference transformer, whose configuration sets its formats.
    """
    if isinstance(adapter, TransformerAdapter):
        raise TPUModelError(
            f"compute_dtype='{dtype}' is for user models, but this is a reference transformer with "
            f"dtype='{adapter.config.dtype}'; use config.replace(dtype='{dtype}')."
        )
    compute, masters = _named("compute_dtype", dtype), _named("param_dtype", param_dtype)
    return NarrowAdapter(adapter, compute, masters)


def _named(field: str, name: str | None) -> Any:
    if name is None:
        return None
    found = spelled_as(name, FLOATS)
    if found is None:
        raise TPUModelError(f"{field}='{name}'; expected one of {', '.join(FLOATS)}.")
    return jnp.dtype(found)


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)
