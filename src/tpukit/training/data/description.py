"""What a data set is, in a few lines."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class DataDescription:
    """Where training data come from and how much there is; None: cannot be known.

    Attributes:
        num_examples: In one epoch.
        filled: Share of all positions that hold a token; the rest is padding.
        fingerprint: Of the content; a checkpoint's position is only taken up on the same.
    """

    kind: str
    path: str
    num_tokens: int | None = None
    num_examples: int | None = None
    num_documents: int | None = None
    sequence_length: int | None = None
    batch_size: int | None = None
    packing: str | None = None
    filled: float | None = None
    dtype: str | None = None
    largest_token: int | None = None
    fingerprint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    def __rich__(self) -> Table:
        table = Table(title=f"data: {self.path}", show_header=False, title_justify="left")
        for name, value in self.to_dict().items():
            if name != "path" and value is not None:
                if isinstance(value, int):
                    shown = f"{value:,}"
                elif isinstance(value, float):
                    shown = f"{value:.1%}"
                else:
                    shown = str(value)
                table.add_row(name.replace("_", " "), shown)
        return table
