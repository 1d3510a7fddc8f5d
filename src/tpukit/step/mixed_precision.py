"""Mixed precision for somebody's own model: wide masters, narrow compute, a wide loss."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import TPUModelError
from ..models.adapters import Applied, ModelAdapter, TransformerAdapter, Variables
from ..models.execution import Execution
from ..models.loss.loss import Batch


@dataclass(frozen=True)
class NarrowAdapter:
    """A model whose parameters and inputs are cast to `dtype` for each use.

    Gradients come back through the cast in the master's own format, outputs go to the loss in
    at least float32, and carried state keeps its format.
    """

    inner: ModelAdapter
    dtype: Any

    @property
    def initialised(self) -> bool:
        """As the model's own."""
        return self.inner.initialised

    def init(self, rng: jax.Array) -> Variables:
        """The model's own variables, wide."""
        return self.inner.init(rng)

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Run the model narrow."""
        narrow = Variables(_cast(variables.params, self.dtype), variables.model_state)
        applied = self.inner.apply(
            narrow, _cast(dict(batch), self.dtype), rng=rng, execution=execution
        )
        state = jax.tree.map(
            lambda new, old: new.astype(old.dtype), applied.model_state, variables.model_state
        )
        outputs = _cast(applied.outputs, jnp.float32)
        return Applied(outputs, state, applied.router, applied.penalty)


def narrowed(adapter: ModelAdapter, dtype: str) -> NarrowAdapter:
    """The model behind `adapter`, computing in `dtype`.

    Raises:
        TPUModelError: It is the reference transformer, which has a dtype of its own.
    """
    if isinstance(adapter, TransformerAdapter):
        raise TPUModelError(
            f"compute_dtype='{dtype}' is for your own models; the reference transformer computes "
            f"in its dtype, here '{adapter.config.dtype}': use config.replace(dtype='{dtype}')."
        )
    if dtype not in ("bfloat16", "float16", "float32"):
        raise TPUModelError(f"compute_dtype='{dtype}'; use 'bfloat16', 'float16' or 'float32'.")
    return NarrowAdapter(adapter, jnp.dtype(dtype))


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)
