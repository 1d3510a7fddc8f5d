"""The arrays of a checkpoint that stay where they are until they are asked for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .named_arrays import LeafShape


class SavedArrays(Mapping[str, Any]):
    """One item of a checkpoint as nested mappings, whose arrays are read one by one.

    Nothing that was read is kept: whoever goes through it needs memory for one array at a time,
    and not for the model.

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
        """Read all arrays one after the other, with their names: words joined by "/"."""
        for word in self:
            found = self[word]
            if not isinstance(found, SavedArrays):
                yield word, found
                continue
            yield from ((f"{word}/{name}", array) for name, array in found.named())

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
