"""Float matrices behind vector codes: they are moved by gradients, and codes follow.

A code cannot be moved a little. So every coded matrix has a shadow: a float matrix that begins as
what the codes say, takes the gradient of the matrix that is used (as if decoding passed it on), and
from time to time has the nearest codes chosen for it. A share of the codes then changes, and
entries and scales are trained beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ...annotations import PyTree
from ...models.stored.parameter import is_stored, matrices_of
from ..vector_codes.recoding import recoded
from ..vector_codes.vq_array import VQArray

# Of every shadow, in units of what quantizing lost.
Moves: TypeAlias = tuple[jax.Array, ...]


@dataclass(frozen=True, eq=False)
class Shadows:
    """The shadows of a tree's coded matrices, in its order.

    Attributes:
        start: float32 (in, out) each, as codes said at first.
        sizes: The root mean square of what quantizing lost of each: the distance between codes,
            more or less, which moves are measured in.
    """

    start: tuple[jax.Array, ...]
    sizes: tuple[jax.Array, ...]

    @classmethod
    def of(cls, stored: PyTree, full: PyTree) -> "Shadows":
        """Those of parameters, beside the full ones."""
        start: list[jax.Array] = []
        sizes: list[jax.Array] = []

        def look(leaf: Any, whole: Any) -> None:
            if not is_stored(leaf):
                return
            for part, exact in zip(leaf.parts, matrices_of(whole, leaf.axes), strict=True):
                if isinstance(part, VQArray):
                    start.append(part.dequantize())
                    sizes.append(jnp.sqrt(jnp.mean((exact - start[-1]) ** 2)))

        jax.tree.map(look, stored, full, is_leaf=is_stored)
        return cls(tuple(start), tuple(sizes))

    @classmethod
    def none(cls) -> "Shadows":
        """No shadows: codes stay."""
        return cls((), ())

    @property
    def unmoved(self) -> Moves:
        """Moves of nothing."""
        return tuple(map(jnp.zeros_like, self.start))

    def recoded(self, stored: PyTree, moves: Moves) -> PyTree:
        """The parameters with the codes that are nearest to moved shadows."""
        shadows = zip(self.start, self.sizes, moves, strict=True)
        wanted = iter([start + size * move for start, size, move in shadows])
        return _with_arrays(stored, lambda array: recoded(array, next(wanted)))


def pulled(params: PyTree, moves: Moves) -> PyTree:
    """The parameters with coded matrices decoded, whose gradients go to moves as well."""
    if not moves:
        return params
    own = iter(moves)

    def decoded(array: VQArray) -> jax.Array:
        move = next(own)
        return array.dequantize() + (move - jax.lax.stop_gradient(move))

    return _with_arrays(params, decoded)


def share_recoded(before: PyTree, after: PyTree) -> float:
    """Which share of codes differs between two such trees."""
    pairs = list(zip(_arrays(before), _arrays(after), strict=True))
    changed = sum(int((old.choices() != new.choices()).sum()) for old, new in pairs)
    return changed / max(1, sum(int(np.prod(old.choices().shape)) for old, _ in pairs))


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, VQArray)


def _arrays(tree: PyTree) -> list[VQArray]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_array) if _is_array(leaf)]


def _with_arrays(tree: PyTree, change: Callable[[VQArray], Any]) -> PyTree:
    return jax.tree.map(
        lambda leaf: change(leaf) if _is_array(leaf) else leaf, tree, is_leaf=_is_array
    )
