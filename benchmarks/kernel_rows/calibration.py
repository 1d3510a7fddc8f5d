"""The fitted constants as a file: of every row, and without each fold of shapes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from kernel_rows.families import Work
from kernel_rows.fitting import Constants, Group, estimate_us, fit_groups, leave_out

DEFAULT_FILE = Path(__file__).parent / "data" / "constants.json"


@dataclass(frozen=True)
class Calibration:
    """Constants of every group, and the shapes that were seen while fitting them."""

    source: str
    fitted_on: str
    shapes: frozenset[str]
    of_all: Mapping[Group, Constants]
    without_fold: Sequence[Mapping[Group, Constants]]

    @classmethod
    def fit(cls, works: Sequence[Work], *, source: str) -> "Calibration":
        """Fit on all rows, and again without the shapes of each fold."""
        shapes = frozenset(work.row.shape_key for work in works)
        today = date.today().isoformat()
        return cls(source, today, shapes, fit_groups(works), leave_out(works))

    def estimate_us(self, work: Work) -> float | None:
        """A row's time by constants that were fitted without its shape."""
        seen = work.row.shape_key in self.shapes
        return estimate_us(work, self.without_fold[work.row.fold] if seen else self.of_all)

    def write(self, path: Path) -> None:
        """Write the constants as JSON, a group a line; a term that is not named counts nothing."""
        path.parent.mkdir(exist_ok=True)
        fields = {
            "source": self.source,
            "fitted_on": self.fitted_on,
            "shapes": sorted(self.shapes),
            "of_all": _as_lists(self.of_all),
            "without_fold": [_as_lists(constants) for constants in self.without_fold],
        }
        lines = json.dumps(fields).replace('{"device"', '\n{"device"').replace('"[', '\n"[')
        path.write_text(lines + "\n")

    @classmethod
    def read(cls, path: Path = DEFAULT_FILE) -> "Calibration":
        """Read what `write` wrote."""
        fields = json.loads(path.read_text())
        return cls(
            fields["source"],
            fields["fitted_on"],
            frozenset(fields["shapes"]),
            _as_groups(fields["of_all"]),
            [_as_groups(constants) for constants in fields["without_fold"]],
        )


def _as_lists(constants: Mapping[Group, Constants]) -> list[dict[str, Any]]:
    names = ("device", "op", "impl", "regime")
    return [
        dict(zip(names, group, strict=True))
        | {"constants": {name: round(value, 4) for name, value in factors.items() if value}}
        for group, factors in sorted(constants.items())
    ]


def _as_groups(entries: Sequence[Mapping[str, Any]]) -> dict[Group, Constants]:
    return {
        (entry["device"], entry["op"], entry["impl"], entry["regime"]): entry["constants"]
        for entry in entries
    }
