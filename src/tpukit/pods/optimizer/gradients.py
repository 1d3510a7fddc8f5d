"""Where gradients come from: batches of a dataset, or gradients that somebody computed."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...annotations import PyTree
from ...errors import TPUValidationError


class DatasetGradients:
    """Gradients that each step computes from its next batch, with the parameters it is given.

    So a batch size that is reduced, or checkpointing that is switched on, holds from the next step
    on, also for gradients that were loaded before.

    Args:
        data: Arrays whose first dimension is over examples, alone or in a tuple or dict (gone
            through again and again), or a list or other iterable of such batches (once).
    """

    def __init__(self, data: PyTree | Iterable[PyTree]) -> None:
        arrays = _are_arrays(data)
        self._batches: Iterator[PyTree] = iter(_again(data) if arrays else data)
        self._left: PyTree = None
        self._at = 0
        self.examples = _examples(data) if arrays else _examples(self._fill())

    def take(self, at_most: int | None) -> PyTree:
        """Return the next examples: a batch, or as many of one as are wanted.

        Raises:
            TPUValidationError: The data are at their end.
        """
        batch = self._fill()
        count = _examples(batch)
        wanted = min(count - self._at, at_most or count)
        start, self._at = self._at, self._at + wanted
        return jax.tree.map(lambda leaf: leaf[start : start + wanted], batch)

    def peek(self, at_most: int | None) -> PyTree:
        """Return what `take` would, and leave it there."""
        at = self._at
        batch = self.take(at_most)
        self._at = at if at < _examples(self._left) else 0
        return batch

    def _fill(self) -> PyTree:
        if self._left is None or self._at >= _examples(self._left):
            try:
                self._left, self._at = next(self._batches), 0
            except StopIteration:
                raise TPUValidationError(
                    "The dataset is at its end; load it again, or pass arrays, which are gone "
                    "through again and again."
                ) from None
        return self._left


def mean_gradients(data: PyTree | Iterable[PyTree], like: PyTree) -> PyTree:
    """Return gradients that were computed elsewhere: a tree like the parameters, or their mean.

    Raises:
        TPUValidationError: They are not like the parameters.
    """
    if isinstance(data, Iterator) or not _fits(data, like):
        each = list(data) if isinstance(data, Iterable) else []
    else:
        each = [data]
    if not each or not all(_fits(one, like) for one in each):
        shapes = [list(jnp.shape(leaf)) for leaf in jax.tree.leaves(like)][:3]
        raise TPUValidationError(
            f"The data are no gradients of parameters {shapes}. For examples, say which loss to "
            "compute: TpuOptimizer(pod).with_loss(lambda parameters, batch: …)."
        )
    return jax.tree.map(lambda *leaves: sum(map(jnp.asarray, leaves)) / len(leaves), *each)


def _fits(tree: Any, like: PyTree) -> bool:
    if jax.tree.structure(tree) != jax.tree.structure(like):
        return False
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True)
    return all(hasattr(a, "shape") and jnp.shape(a) == jnp.shape(b) for a, b in pairs)


def _are_arrays(data: Any) -> bool:
    if not isinstance(data, np.ndarray | jax.Array | tuple | dict):
        return False
    leaves = jax.tree.leaves(data)
    kinds = (np.ndarray, jax.Array)
    return bool(leaves) and all(isinstance(leaf, kinds) and leaf.ndim for leaf in leaves)


def _again(data: PyTree) -> Iterator[PyTree]:
    while True:
        yield data


def _examples(batch: PyTree) -> int:
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        raise TPUValidationError(
            f"The arrays of a batch have {sorted(sizes)} examples; their first dimensions must "
            "agree."
        )
    return int(sizes.pop()[0])
