"""What `tpukit kernel tune` found, and where its blocks are kept."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..shown import Shown

if TYPE_CHECKING:
    from ..kernels.registry.op import Op
    from ..kernels.tuning import TuningResult


def folder_for(op: "Op", out: Path | None) -> Path:
    """Where the blocks of an op go: in `out`, or beside the op.

    Raises:
        TPUValidationError: It is nowhere, or nothing can be written there.
    """
    from ..errors import TPUValidationError
    from ..kernels.blocks.tuned import data_folder
    from ..kernels.registry.registry import builtin_ops
    from ..runtime.files import try_output_folder

    if out is None and op.name not in builtin_ops():
        raise TPUValidationError(f"{op.name} has no folder of its own: give -o, or --dry-run.")
    folder = data_folder(op.name) if out is None else out / op.name
    try_output_folder(folder)
    return folder


@dataclass(frozen=True)
class Tunings(Shown):
    """What was tuned.

    Attributes:
        folder: Where the blocks were written; None where they were not.
    """

    results: "tuple[TuningResult, ...]"
    folder: Path | None = None

    @property
    def note(self) -> str:
        """Where the blocks are, and what makes dispatch take them."""
        from ..kernels.blocks.tuned import data_folder

        if self.folder is None:
            return "Nothing was written (--dry-run)."
        where = f"The blocks are in {self.folder}"
        if self.folder == data_folder(self.results[0].op):
            return f"{where}, where dispatch finds them."
        return f"{where}; use_tuned_blocks({str(self.folder.parent)!r}) lets dispatch take them."

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "results": [result.to_dict() for result in self.results],
            "folder": None if self.folder is None else str(self.folder),
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(*self.results, Text(self.note))
