"""`metrics.jsonl`: one JSON object a line, each step once, whatever happened in between.

Going back to a step (a resume, a rollback) takes out the lines after it, which are then written
anew. So the file always reads as one run without interruptions, and `train.log` says what happened.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import TPUValidationError
from ..runtime.files import write_bytes
from ..runtime.run_files import METRICS_FILE
from .lines import AppendedLines


class MetricsFile:
    """Appends records to a JSON-lines file.

    Args:
        path: The file; made when it is not there.
        after_step: The last step that is kept of what the file holds.
    """

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        self.path = path
        self._lines = AppendedLines(path)
        self.roll_back(after_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; numbers that JSON has no word for become null and are named."""
        odd = [name for name, value in record.items() if _is_odd(value)]
        line = {name: None if name in odd else value for name, value in record.items()}
        if odd:
            line["not_finite"] = {name: str(record[name]) for name in odd}
        self._lines.write(json.dumps(line, ensure_ascii=False) + "\n")

    def roll_back(self, step: int) -> None:
        """Take out the records after `step`, and a last line that was cut short."""
        self._lines.close()
        with contextlib.suppress(OSError):  # a full disk, on which lines wait
            self.path.touch(mode=0o600)
        if not self.path.is_file():
            return
        kept = [line for line, record in _lines(self.path) if record.get("step", 0) <= step]
        whole, there = "".join(kept).encode(), self.path.read_bytes()
        if there.startswith(whole):
            os.truncate(self.path, len(whole))  # a full disk has no room for a second file
        else:
            write_bytes(self.path, whole, private=True)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a metrics file, or of the run directory that holds one.

    Raises:
        TPUValidationError: There is none.
    """
    file = Path(path)
    file = file / METRICS_FILE if file.is_dir() else file
    if not file.is_file():
        raise TPUValidationError(f"{file} is not there; name a run directory or its metrics.jsonl.")
    return [record for _, record in _lines(file)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a line that a kill cut short
            if isinstance(record, dict) and line.endswith("\n"):
                yield line, record


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
