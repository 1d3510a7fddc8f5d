"""`LoraAdapter`: any model, with thin matrices beside its own that alone are trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...parallel.sharding.trees import join_path
from ..adapters import Applied, ModelAdapter, TransformerAdapter, Variables, head_counts_of
from ..execution import Execution
from ..loss.loss import Batch
from ..stored.parameter import is_stored
from ..stored.running import with_stored_parameters
from .low_rank import LowRank
from .spec import LoraSpec
from .targets import can_have_thin, targeted, thin_shapes

# Where the reference transformer's layers add `(x @ a) @ b` themselves, one layer at a time.
_IN_LAYERS = "layers/"
# Where its unembedding is: of its own, or the embedding's.
_UNEMBEDDINGS = {"lm_head", "embed"}


def matrices_meant(spec: LoraSpec, params: Any) -> dict[str, Any]:
    """The matrices of a tree that are meant, by path.

    Raises:
        TPUModelError: See `targeted`.
    """
    named = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_stored)
    leaves = {join_path(p): leaf for p, leaf in named}
    return targeted(spec, {path: leaf for path, leaf in leaves.items() if _is_matrix(path, leaf)})


@dataclass(frozen=True)
class LoraAdapter:
    """A model whose own parameters are carried as they are, and trained low-rank ones beside them.

    `params` holds `a` and `b` under the path of each matrix; `model_state` holds the model's own
    parameters as `base`, and what it carries itself as `carried`. So the optimizer keeps moments
    of the thin matrices alone, and no gradient of the others is computed.

    Attributes:
        inner: The model.
        spec: Which matrices get thin ones beside them.
        keep: What the model's own parameters are kept as, some of them stored in few bits; None
            for as they are.
    """

    inner: ModelAdapter
    spec: LoraSpec
    keep: Callable[[Any], Any] | None = None

    @property
    def initialised(self) -> bool:
        """Whether the model's own arrays exist already."""
        return self.inner.initialised

    @property
    def head_counts(self) -> Mapping[str, int] | None:
        """Heads of the model, where it says them."""
        return head_counts_of(self.inner)

    def init(self, rng: jax.Array) -> Variables:
        """The model's own variables, and thin matrices whose products are zero."""
        made = self.inner.init(rng)
        base = made.params if self.keep is None else self.keep(made.params)
        return self.beside(base, made.model_state, rng)

    def beside(self, base: Any, carried: Any, rng: jax.Array) -> Variables:
        """Variables with new thin matrices beside a model's parameters."""
        params: dict[str, Any] = {}
        for number, (path, leaf) in enumerate(sorted(matrices_meant(self.spec, base).items())):
            first, second = thin_shapes(leaf.shape, self.spec.rank)
            # As peft draws the first: uniform, of variance 1 / (3 inputs).
            bound = first[-2] ** -0.5
            key = jax.random.fold_in(jax.random.fold_in(rng, 1), number)
            a = jax.random.uniform(key, first, jnp.float32, -bound, bound)
            _put(params, path, {"a": a, "b": jnp.zeros(second, jnp.float32)})
        return Variables(params, {"base": base, "carried": carried})

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Run the model with what the thin matrices add."""
        base, carried = variables.model_state["base"], variables.model_state["carried"]
        in_layers = isinstance(self.inner, TransformerAdapter)
        if in_layers and not _UNEMBEDDINGS & set(variables.params):
            execution = execution.replace(frozen_head=True)

        def whole(base: Any, params: Any, carried: Any, batch: Batch) -> Applied:
            summed = with_low_rank(base, params, self.spec, in_layers=in_layers)
            return self.inner.apply(Variables(summed, carried), batch, rng=rng, execution=execution)

        run = with_stored_parameters(whole, trained=True)
        applied = run(base, variables.params, carried, batch)
        return applied._replace(model_state={"base": base, "carried": applied.model_state})


def with_low_rank(base: Any, params: Any, spec: LoraSpec, *, in_layers: bool = False) -> Any:
    """A model's parameters with what thin matrices add to them.

    Args:
        base: The model's own, as arrays.
        params: `a` and `b` under the path of each matrix.
        spec: How much of their product is added.
        in_layers: Whether the reference transformer's layers get `LowRank` and add it themselves.
    """

    def one(path: Any, leaf: Any) -> Any:
        name = join_path(path)
        thin = _find(params, name)
        if thin is None:
            return leaf
        low = LowRank(leaf, thin["a"], thin["b"] * spec.scale)
        return low if in_layers and name.startswith(_IN_LAYERS) else low.merged()

    return jax.tree_util.tree_map_with_path(one, base)


def _is_matrix(path: str, leaf: Any) -> bool:
    floating = jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating)
    return floating and can_have_thin(path, leaf.ndim)


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split("/")
    for word in parents:
        tree = tree.setdefault(word, {})
    tree[leaf] = value


def _find(tree: Any, path: str) -> Any:
    for word in path.split("/"):
        if not isinstance(tree, Mapping) or word not in tree:
            return None
        tree = tree[word]
    return tree
