"""`LoraAdapter`: any model, with thin matrices beside its own that alone are trained."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import TPUModelError, did_you_mean
from ...parallel.sharding.trees import join_path
from ..adapters import Applied, ModelAdapter, TransformerAdapter, Variables, head_counts_of
from ..execution import Execution
from ..loss.loss import Batch
from ..stored.parameter import is_stored
from ..stored.running import with_stored_parameters
from .low_rank import LowRank
from .spec import DEFAULT_TARGETS, LoraSpec

# Where the reference transformer's layers add `(x @ a) @ b` themselves, one layer at a time.
_IN_LAYERS = "layers/"


def matrices_meant(spec: LoraSpec, params: Any) -> dict[str, Any]:
    """The matrices that are meant, by path.

    Raises:
        TPUModelError: A pattern finds none, or is no regular expression.
    """
    named = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_stored)
    leaves = {join_path(p): leaf for p, leaf in named}
    matrices = {path: leaf for path, leaf in leaves.items() if _is_matrix(path, leaf)}
    found: dict[str, Any] = {}
    for target in spec.targets:
        try:
            pattern = re.compile(target)
        except re.error as error:
            raise TPUModelError(f"lora target {target!r} is no pattern: {error}.") from None
        meant = {path: leaf for path, leaf in matrices.items() if pattern.search(path)}
        if not meant and spec.targets != DEFAULT_TARGETS:
            names = sorted({word for path in matrices for word in path.split("/")})
            raise TPUModelError(
                f"lora target '{target}' is in the path of no matrix; there are "
                f"{', '.join(list(matrices)[:8])} ….{did_you_mean(target, names)}"
            )
        found |= meant
    if not found:
        raise TPUModelError(
            f"the model has no matrices called {', '.join(spec.targets)}; name some of "
            f"{', '.join(list(matrices)[:8])} … in lora targets."
        )
    return found


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
            *stack, inputs, outputs = leaf.shape
            # As peft draws the first: uniform, of variance 1 / (3 inputs).
            bound = inputs**-0.5
            key = jax.random.fold_in(jax.random.fold_in(rng, 1), number)
            a = jax.random.uniform(
                key, (*stack, inputs, self.spec.rank), jnp.float32, -bound, bound
            )
            b = jnp.zeros((*stack, self.spec.rank, outputs), jnp.float32)
            _put(params, path, {"a": a, "b": b})
        return Variables(params, {"base": base, "carried": carried})

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Run the model with what the thin matrices add."""
        base, carried = variables.model_state["base"], variables.model_state["carried"]
        in_layers = isinstance(self.inner, TransformerAdapter)

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
    return floating and leaf.ndim >= 2 and not path.endswith(("scale", "bias"))


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
