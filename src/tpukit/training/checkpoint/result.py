"""What restoring and verifying give back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from rich.table import Table

from ...errors import TPUCheckpointError, did_you_mean
from ...shown import Shown

DECIMAL_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Shown):
    """A restored checkpoint; its items are attributes: `checkpoint.params`.

    Attributes:
        step: The step it was taken after.
        items: Every restored item by name.
        metadata: What was given to `save(metadata=...)`.
        positions: Where the data stream of each process that saved it stood, by process.
        skipped: Newer checkpoints that were passed over, with the reason.
    """

    step: int
    items: Mapping[str, Any]
    metadata: dict[str, Any]
    positions: tuple[dict[str, Any] | None, ...]
    skipped: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def data(self) -> dict[str, Any] | None:
        """Where this process's data stream stood.

        Raises:
            TPUCheckpointError: Another number of processes saved it, each at its own place.
        """
        first = self.positions[0]
        if all(position == first for position in self.positions):
            return first
        if len(self.positions) == jax.process_count():
            return self.positions[jax.process_index()]
        raise TPUCheckpointError(
            f"Step {self.step} was saved by {len(self.positions)} processes, each at its own "
            f"place in the data, and this job has {jax.process_count()}; restart with as many "
            "processes, or choose a new position from .positions."
        )

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that are no field; `items` itself is missing while unpickling.
        items: Mapping[str, Any] = self.__dict__.get("items", {})
        if name in items:
            return items[name]
        raise AttributeError(
            f"The checkpoint holds no '{name}'; it holds {', '.join(items) or 'no items'}."
            + did_you_mean(name, items)
        )

    def __getitem__(self, name: str) -> Any:
        if name not in self.items:
            raise KeyError(f"{name}; the checkpoint holds {', '.join(self.items) or 'no items'}")
        return self.items[name]

    def to_dict(self) -> dict[str, Any]:
        """Step, item sizes, metadata and positions as plain data; no arrays."""
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


@dataclass(frozen=True, kw_only=True)
class Verification(Shown):
    """Whether a checkpoint on disk still is what was written (origin: measured).

    Attributes:
        step: Which checkpoint.
        problem: The first thing found wrong, or None.
        files: How many files this process compared.
        size_bytes: How large they are together.
        elapsed_s: How long it took.
    """

    step: int
    problem: str | None
    files: int
    size_bytes: int
    elapsed_s: float

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return self.problem is None

    def to_dict(self) -> dict[str, Any]:
        """The verification as plain data."""
        return {
            "step": self.step,
            "good": self.good,
            "problem": self.problem,
            "files": self.files,
            "size_bytes": self.size_bytes,
            "elapsed_s": self.elapsed_s,
        }

    def __rich__(self) -> Any:
        from rich.text import Text

        verdict = [("good", "")] if self.good else [("not good", "red"), (f": {self.problem}", "")]
        return Text.assemble(
            f"step {self.step}: ",
            *verdict,
            f" ({self.files} files, {self.size_bytes / DECIMAL_GB:.3f} GB, "
            f"{self.elapsed_s:.2f} s, measured)",
        )


def _num_bytes(tree: Any) -> int:
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree))
