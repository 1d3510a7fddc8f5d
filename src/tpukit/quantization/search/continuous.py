"""What of a quantized model is a number and no code, and can be trained beside codes.

Entries of codebooks, scales, and every array that was not quantized. While they are trained they
are float32; a model made of them has each as it is kept, and gradients pass the rounding by.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ...annotations import PyTree
from ...hardware.formats import INT8
from ...kernels.ops.quantized_matmul.weight import QuantizedWeight
from ...kernels.rounding import round_to_bound
from ..vector_codes.vq_array import VQArray

# Of every array that can be trained, in units of its size.
Changes: TypeAlias = tuple[jax.Array, ...]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("start", "sizes", "kept"),
    meta_fields=("places", "structure"),
)
@dataclass(frozen=True, eq=False)
class Continuous:
    """The arrays of a tree that can be trained, and all others; a tree itself, as programs take it.

    Attributes:
        start: float32, as they were.
        sizes: The root mean square of each, which its changes are measured in; an array of zeros
            stays as it is.
        kept: All leaves of the tree as they are kept.
        places: Among those, of the ones that can be trained.
        structure: Of the tree.
    """

    start: tuple[jax.Array, ...]
    sizes: tuple[jax.Array, ...]
    kept: tuple[Any, ...]
    places: tuple[int, ...]
    structure: Any

    @classmethod
    def of(cls, params: PyTree) -> "Continuous":
        """Those of parameters, stored ones among them."""
        kept, structure = jax.tree.flatten(params)
        marks = jax.tree.leaves(jax.tree.map(_trainable, params, is_leaf=_is_coded))
        places = tuple(place for place, mark in enumerate(marks) if mark)
        start = tuple(jnp.asarray(kept[place], jnp.float32) for place in places)
        sizes = tuple(jnp.sqrt(jnp.mean(one**2)) for one in start)
        return cls(start, sizes, tuple(kept), places, structure)

    @property
    def unchanged(self) -> Changes:
        """Changes of nothing."""
        return tuple(map(jnp.zeros_like, self.start))

    @property
    def tree(self) -> PyTree:
        """The tree as it is kept."""
        return self.structure.unflatten(self.kept)

    def with_kept(self, tree: PyTree) -> "Continuous":
        """The same arrays to train, beside the codes of another tree."""
        kept, structure = jax.tree.flatten(tree)
        return replace(self, kept=tuple(kept), structure=structure)

    def params(self, changes: Changes) -> PyTree:
        """The tree with changed arrays: floats with the values that they would be kept with.

        Gradients are those of the changes as if nothing were rounded.
        """
        return self._with([_as_kept(one, kept) for one, kept in self._changed(changes)])

    def stored(self, changes: Changes) -> PyTree:
        """The tree with changed arrays, as they are kept."""
        return self._with([_rounded(one, kept) for one, kept in self._changed(changes)])

    def _changed(self, changes: Changes) -> list[tuple[jax.Array, Any]]:
        rows = zip(self.places, self.start, self.sizes, changes, strict=True)
        return [(start + size * change, self.kept[place]) for place, start, size, change in rows]

    def _with(self, arrays: list[jax.Array]) -> PyTree:
        leaves = list(self.kept)
        for place, array in zip(self.places, arrays, strict=True):
            leaves[place] = array
        return self.structure.unflatten(leaves)


def _is_coded(leaf: object) -> bool:
    return isinstance(leaf, VQArray | QuantizedWeight)


def _trainable(leaf: Any) -> Any:
    """A tree like the leaf's, True where an array is no code."""
    if isinstance(leaf, VQArray):
        signs = None if leaf.signs is None else False
        return replace(leaf, codes=False, entries=True, scales=True, signs=signs)
    if isinstance(leaf, QuantizedWeight):
        codebook = None if leaf.codebook is None else False
        return replace(leaf, data=False, scales=True, codebook=codebook)
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _rounded(array: jax.Array, kept: Any) -> jax.Array:
    if kept.dtype == jnp.int8:
        return round_to_bound(array, INT8, INT8.largest)
    return array.astype(kept.dtype)


def _as_kept(array: jax.Array, kept: Any) -> jax.Array:
    rounded = _rounded(array, kept)
    if kept.dtype != jnp.int8:
        return rounded  # a conversion between floats passes gradients on
    return array + jax.lax.stop_gradient(rounded.astype(jnp.float32) - array)
