"""`LoraAdapter`: any model with frozen parameters and trained LoRA matrices."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...annotations import AnyMesh, PyTree
from ...parallel.mesh.axes import axes_with_role
from ...parallel.mesh.mesh import axis_sizes
from ...parallel.sharding.layout import Layout, make_layout
from ...parallel.sharding.rules import entries_spec, spec_entries
from ...parallel.sharding.trees import join_path
from ..adapters import Applied, ModelAdapter, TransformerAdapter, Variables, head_counts_of
from ..execution import Execution
from ..loss import Batch
from ..stored.parameter import is_stored
from ..stored.running import with_stored_parameters
from .low_rank import LowRank
from .spec import LoraSpec, can_have_lora, lora_shapes, matching_targets

# Path of the reference transformer's layers, which add `(x @ a) @ b` themselves.
_IN_LAYERS = "layers/"
# Parameters that may be the unembedding.
_UNEMBEDDINGS = {"lm_head", "embed"}


def target_matrices(spec: LoraSpec, params: PyTree) -> dict[str, Any]:
    """Return the target matrices of a parameter tree by path.

    Raises:
        TPUModelError: See `matching_targets`.
    """
    named = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_stored)
    leaves = {join_path(p): leaf for p, leaf in named}
    return matching_targets(
        spec, {path: leaf for path, leaf in leaves.items() if _is_matrix(path, leaf)}
    )


@dataclass(frozen=True)
class LoraAdapter:
    """A model with frozen parameters and trained LoRA matrices.

    `params` has `a` and `b` under the path of each target matrix. `model_state` has the frozen
    parameters as `base` and the model's own carried state as `carried`. So the optimizer keeps
    moments of the LoRA matrices only, and no gradients of frozen parameters are computed.

    Attributes:
        inner: The model.
        spec: The LoRA settings.
        keep: A function that returns the frozen parameters in a quantized form, or None.
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
        """Numbers of heads, or None where the model's adapter has none."""
        return head_counts_of(self.inner)

    def init(self, rng: jax.Array) -> Variables:
        """Return the model's variables and LoRA matrices whose update is zero."""
        made = self.inner.init(rng)
        base = made.params if self.keep is None else self.keep(made.params)
        return self.with_new_matrices(base, made.model_state, rng)

    def with_new_matrices(self, base: PyTree, carried: PyTree, rng: jax.Array) -> Variables:
        """Return variables with new LoRA matrices for frozen parameters `base`."""
        params: dict[str, PyTree] = {}
        for number, (path, leaf) in enumerate(sorted(target_matrices(self.spec, base).items())):
            first, second = lora_shapes(leaf.shape, self.spec.rank)
            # peft's initialisation of `a`: uniform, with variance 1 / (3 inputs).
            bound = first[-2] ** -0.5
            key = jax.random.fold_in(jax.random.fold_in(rng, 1), number)
            a = jax.random.uniform(key, first, jnp.float32, -bound, bound)
            _put(params, path, {"a": a, "b": jnp.zeros(second, jnp.float32)})
        return Variables(params, {"base": base, "carried": carried})

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Run the model with the LoRA updates."""
        base, carried = variables.model_state["base"], variables.model_state["carried"]
        in_layers = isinstance(self.inner, TransformerAdapter)
        if in_layers and not _UNEMBEDDINGS & set(variables.params):
            execution = execution.replace(frozen_head=True)

        def apply_sum(base: PyTree, params: PyTree, carried: PyTree, batch: Batch) -> Applied:
            summed = with_low_rank(base, params, self.spec, in_layers=in_layers)
            return self.inner.apply(Variables(summed, carried), batch, rng=rng, execution=execution)

        run = with_stored_parameters(apply_sum, trained=True)
        applied = run(base, variables.params, carried, batch)
        return applied._replace(model_state={"base": base, "carried": applied.model_state})


def with_low_rank(base: PyTree, params: PyTree, spec: LoraSpec, *, in_layers: bool = False) -> Any:
    """Return a model's parameters with LoRA updates.

    Args:
        base: The frozen parameters as arrays.
        params: `a` and `b` under the path of each target matrix.
        spec: The LoRA settings.
        in_layers: Whether parameters of the reference transformer's layers become `LowRank`, to
            which the layers apply the update themselves.
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
    return floating and can_have_lora(path, leaf.ndim)


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split("/")
    for word in parents:
        tree = tree.setdefault(word, {})
    tree[leaf] = value


def _find(tree: PyTree, path: str) -> Any:
    for word in path.split("/"):
        if not isinstance(tree, Mapping) or word not in tree:
            return None
        tree = tree[word]
    return tree


def lora_layout(params: PyTree, base: Layout) -> Layout:
    """Return the layout of LoRA matrices for weights with the layout `base`.

    `a` is sharded along its inputs and `b` along its outputs, never along the rank. The axes are
    those of the weight's dimension, and the `fsdp` axes of its other dimension where they divide
    the size.

    Args:
        params: `a` and `b` under the path of each weight, as arrays or shapes.
        base: The layout of the weights.
    """
    named = jax.tree_util.tree_leaves_with_path(params)
    specs = {join_path(path): _spec(join_path(path), leaf, base) for path, leaf in named}
    rules = [(f"^{re.escape(path)}$", spec) for path, spec in specs.items()]
    # Without rules, `make_layout` does not warn that nothing is sharded.
    return make_layout(params, base.mesh, None, rules=rules if any(specs.values()) else None)


def _spec(path: str, thin: Any, base: Layout) -> PartitionSpec:
    weight, which = path.rsplit("/", 1)
    placed = base.find(weight)
    assert placed is not None, path
    *stack, inputs, outputs = spec_entries(placed.spec, len(thin.shape))
    if which == "a":
        return entries_spec([*stack, _cut(thin.shape[-2], inputs, outputs, base.mesh), ()])
    return entries_spec([*stack, (), _cut(thin.shape[-1], outputs, inputs, base.mesh)])


def _cut(
    size: int, own: tuple[str, ...], others: tuple[str, ...], mesh: AnyMesh
) -> tuple[str, ...]:
    sizes = axis_sizes(mesh)
    both = (*own, *axes_with_role(others, "fsdp"))
    return own if size % math.prod(sizes[axis] for axis in both) else both
