"""The contents of a checkpoint: restored at once, or read array by array."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from rich.table import Table

from ...annotations import PyTree
from ...errors import TPUCheckpointError, did_you_mean
from ...shown import Shown
from .named_arrays import LeafShape

DECIMAL_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Shown):
    """A restored checkpoint; its items are attributes: `checkpoint.params`.

    Attributes:
        step: The number of steps taken before it was saved.
        items: Every restored item by name.
        metadata: The argument of `save(metadata=...)`.
        positions: Position of the data stream of each process that saved it.
        skipped: Newer checkpoints that were not restored, with the reason.
    """

    step: int
    items: Mapping[str, Any]
    metadata: dict[str, Any]
    positions: tuple[dict[str, Any] | None, ...]
    skipped: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def data(self) -> dict[str, Any] | None:
        """Position of this process's data stream.

        Raises:
            TPUCheckpointError: Another number of processes saved it, each at another position.
        """
        first = self.positions[0]
        if all(position == first for position in self.positions):
            return first
        if len(self.positions) == jax.process_count():
            return self.positions[jax.process_index()]
        raise TPUCheckpointError(
            f"Step {self.step} was saved by {len(self.positions)} processes, each at another "
            f"position in the data, but this job has {jax.process_count()}; restart with as many "
            "processes, or choose a position from .positions."
        )

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not fields; `items` itself is missing while unpickling.
        items: Mapping[str, Any] = self.__dict__.get("items", {})
        if name in items:
            return items[name]
        raise AttributeError(
            f"The checkpoint has no '{name}'; it has {', '.join(items) or 'no items'}."
            + did_you_mean(name, items)
        )

    def __getitem__(self, name: str) -> Any:
        if name not in self.items:
            raise KeyError(f"{name}; the checkpoint has {', '.join(self.items) or 'no items'}")
        return self.items[name]

    def to_dict(self) -> dict[str, Any]:
        """Return step, item sizes, metadata and positions as plain data, without the arrays."""
        return {
            "step": self.step,
            "items": {name: _num_bytes(tree) for name, tree in self.items.items()},
            "metadata": self.metadata,
            "positions": list(self.positions),
            "skipped": {str(step): reason for step, reason in self.skipped.items()},
        }

    def __rich__(self) -> Table:
        table = Table(title=f"Checkpoint of step {self.step}")
        table.add_column("item")
        table.add_column("arrays", justify="right")
        table.add_column("GB", justify="right")
        for name, tree in self.items.items():
            count = len(jax.tree.leaves(tree))
            table.add_row(name, str(count), f"{_num_bytes(tree) / DECIMAL_GB:.3f}")
        return table


class SavedArrays(Mapping[str, Any]):
    """One item of a checkpoint as nested mappings; each access reads one array.

    Arrays that were read are not kept, so an iteration needs memory for one array at a time.

    Args:
        shapes: The arrays under this mapping.
        read: Reads one of them to host memory.
        depth: How many words of their names lead to this mapping.
    """

    def __init__(
        self, shapes: Sequence[LeafShape], read: Callable[[LeafShape], Any], *, depth: int = 0
    ) -> None:
        self._shapes: dict[str, list[LeafShape]] = {}
        self._read = read
        self._depth = depth
        for shape in shapes:
            self._shapes.setdefault(str(shape.words[depth]), []).append(shape)

    def __getitem__(self, word: str) -> Any:
        below = self._shapes[word]
        if len(below[0].words) == self._depth + 1:
            return self._read(below[0])
        return SavedArrays(below, self._read, depth=self._depth + 1)

    def named(self) -> Iterator[tuple[str, Any]]:
        """Read all arrays one after the other; yield (name with words joined by "/", array)."""
        for word in self:
            value = self[word]
            if not isinstance(value, SavedArrays):
                yield word, value
                continue
            yield from ((f"{word}/{name}", array) for name, array in value.named())

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


@dataclass(frozen=True)
class SavedItem:
    """One item of a checkpoint, not read yet.

    Attributes:
        step: The step.
        arrays: The item's arrays.
        items: Names of all items of the checkpoint.
    """

    step: int
    arrays: SavedArrays
    items: tuple[str, ...]


def _num_bytes(tree: PyTree) -> int:
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree))
