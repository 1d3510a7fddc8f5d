"""The ops there are, as a table and as data."""

from dataclasses import dataclass
from typing import Any

from ...shown import Shown
from .op import Op
from .registry import get_tpu_op, list_tpu_ops


@dataclass(frozen=True)
class OpListing(Shown):
    """The ops there are."""

    ops: tuple[Op, ...]

    @classmethod
    def of_registry(cls) -> "OpListing":
        """Every op that is registered."""
        return cls(tuple(get_tpu_op(name) for name in list_tpu_ops()))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            op.name: {
                "implementations": list(op.implementations),
                "cases": [case.to_dict() for case in op.cases],
            }
            for op in self.ops
        }

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table("op", "as", show_edge=False)
        # Whole, so that a name can be copied into --case.
        table.add_column("cases", overflow="fold")
        for op in self.ops:
            cases = "\n".join(case.name for case in op.cases)
            table.add_row(op.name, "\n".join(op.implementations), cases)
        return table
