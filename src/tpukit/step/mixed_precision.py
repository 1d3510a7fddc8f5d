"""Mixed precision for somebody's own model: wide masters, narrow compute, a wide loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import TPUModelError
from ..hardware.formats import spelled_as
from ..models.adapters import Applied, ModelAdapter, TransformerAdapter, Variables, head_counts_of
from ..models.execution import Execution
from ..models.loss.loss import Batch

FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class NarrowAdapter:
    """A model whose parameters and inputs are cast to `dtype` for each use.

    Gradients come back through the cast in the master's own format, outputs go to the loss in
    at least float32, and carried state keeps its format. `param_dtype` is what masters are kept
    in; None leaves either as the model has it.
    """

    inner: ModelAdapter
    dtype: Any
    param_dtype: Any

    @property
    def initialised(self) -> bool:
        """True when the model's own arrays exist already."""
        return self.inner.initialised

    @property
    def head_counts(self) -> Mapping[str, int] | None:
        """Heads of the model, where it says them."""
        return head_counts_of(self.inner)

    def init(self, rng: jax.Array) -> Variables:
        """Make the model's own variables, in the format of masters."""
        made = self.inner.init(rng)
        if self.param_dtype is None:
            return made
        return Variables(_cast(made.params, self.param_dtype), made.model_state)

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Run the model narrow."""
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
    """Return the model behind `adapter`, computing in `dtype` with masters in `param_dtype`.

    Raises:
        TPUModelError: It is the reference transformer, which has formats of its own.
    """
    if isinstance(adapter, TransformerAdapter):
        raise TPUModelError(
            f"compute_dtype='{dtype}' is for your own models; the reference transformer computes "
            f"in its dtype, here '{adapter.config.dtype}': use config.replace(dtype='{dtype}')."
        )
    compute, masters = _named("compute_dtype", dtype), _named("param_dtype", param_dtype)
    return NarrowAdapter(adapter, compute, masters)


def _named(field: str, name: str | None) -> Any:
    if name is None:
        return None
    found = spelled_as(name, FLOATS)
    if found is None:
        raise TPUModelError(f"{field}='{name}'; use {', '.join(FLOATS)}.")
    return jnp.dtype(found)


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)
