"""Float shadows of coded matrices, which tuning trains and codes again.

A code has no gradient. So every coded matrix has a shadow: a float matrix that starts as the
decoded codes and receives the gradient of the decoded matrix (straight-through). From time to time
the nearest codes of the shadow are chosen, so some codes change, while entries and scales are
trained as well. Codes are chosen without error feedback (see `refinement`), because with it a small
change of the shadow would change codes far away.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ...annotations import PyTree
from ...models.stored.parameter import is_stored, matrices_of
from ..vector_codes.choice import CodeChoice, choice_for, choose_all, decode_rows
from ..vector_codes.vq_array import VQArray, rotate


def recoded(array: VQArray, wanted: jax.Array) -> VQArray:
    """Return the array with the codes that decode nearest to `wanted`; entries and scales stay.

    Args:
        array: One matrix.
        wanted: float32 (in, out).
    """
    return _recoded(array, wanted, choice_for(array.format))


@partial(jax.jit, static_argnames="choice")
def _recoded(array: VQArray, wanted: jax.Array, choice: CodeChoice) -> VQArray:
    with jax.default_matmul_precision("highest"):
        before = array.choices()
        (height, width), tables = array.shape, array.entries.astype(jnp.float32)
        tall, wide = before.shape[1] * tables.shape[2], before.shape[2]
        if array.signs is not None:
            wanted = rotate(wanted, array.signs)
        scales = jnp.where(array.scales == 0, 1, array.scales).astype(jnp.float32)
        rows = jnp.pad(wanted / scales, ((0, tall - height), (0, wide - width)))
        counts = (jnp.arange(tall) < height).astype(jnp.float32)
        squares = jnp.pad(scales**2, (0, wide - width))
        found = choose_all(rows, counts, squares, tables, choice=choice)

        def lost(codes: jax.Array) -> jax.Array:
            """Return losses (blocks, out), summed over codes that are chosen together."""
            errors = counts[:, None] * squares * (rows - decode_rows(codes, tables)) ** 2
            return jax.vmap(choice.shared)(errors.reshape(-1, tables.shape[2], wide).sum(1))

        # The search is not exhaustive, so what was chosen before may be the better.
        return array.with_choices(jnp.where(lost(found) < lost(before), found, before))


# Of every shadow, in units of what quantizing lost.
Moves: TypeAlias = tuple[jax.Array, ...]


@dataclass(frozen=True, eq=False)
class Shadows:
    """The shadows of a tree's coded matrices, in the order of its leaves.

    Attributes:
        start: float32 (in, out) each, as decoded at the start.
        sizes: Root mean square quantization error of each, about the distance between codes; the
            unit of changes.
    """

    start: tuple[jax.Array, ...]
    sizes: tuple[jax.Array, ...]

    @classmethod
    def of(cls, stored: PyTree, full: PyTree) -> "Shadows":
        """Build the shadows of quantized parameters and their full ones."""
        start: list[jax.Array] = []
        sizes: list[jax.Array] = []

        def look(leaf: Any, full: PyTree) -> None:
            if not is_stored(leaf):
                return
            for part, exact in zip(leaf.parts, matrices_of(full, leaf.axes), strict=True):
                if isinstance(part, VQArray):
                    start.append(part.dequantize())
                    sizes.append(jnp.sqrt(jnp.mean((exact - start[-1]) ** 2)))

        jax.tree.map(look, stored, full, is_leaf=is_stored)
        return cls(tuple(start), tuple(sizes))

    @classmethod
    def none(cls) -> "Shadows":
        """Return no shadows, so that codes stay."""
        return cls((), ())

    @property
    def unmoved(self) -> Moves:
        """Return zero moves."""
        return tuple(map(jnp.zeros_like, self.start))

    def recoded(self, stored: PyTree, moves: Moves) -> PyTree:
        """Return the parameters with the codes nearest to the moved shadows."""
        shadows = zip(self.start, self.sizes, moves, strict=True)
        wanted = iter([start + size * move for start, size, move in shadows])
        return _with_arrays(stored, lambda array: recoded(array, next(wanted)))


def pulled(params: PyTree, moves: Moves) -> PyTree:
    """Return the parameters with decoded matrices, whose gradients also reach `moves`."""
    if not moves:
        return params
    own = iter(moves)

    def decoded(array: VQArray) -> jax.Array:
        move = next(own)
        return array.dequantize() + (move - jax.lax.stop_gradient(move))

    return _with_arrays(params, decoded)


def share_recoded(before: PyTree, after: PyTree) -> float:
    """Return the share of codes that differ between two such trees."""
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
