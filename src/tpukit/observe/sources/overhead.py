"""How much of a step is communication: measured by a profile of the run, else as predicted."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...runtime.run_files import CHECK_FILE
from ...runtime.run_tail import newest_run
from ..readings import Reading, ReadingBuilder

METRIC = "communication_overhead"
# Where a run directory has it: a report of its profile first, then the check made before it.
PROFILES = ("profile/report.json", "profile/*/report.json")


UNREADABLE = (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError)


class OverheadSource:
    """Reads the share of communication from what a run directory holds, when that changes.

    Args:
        run_dir: The run; by default the one under runs/ that was written last.
        process: Index of the process of the run.
    """

    name = "profile"

    def __init__(self, run_dir: str | Path | None = None, *, process: int = 0) -> None:
        self._given = None if run_dir is None else Path(run_dir)
        self._process = process
        self._read: tuple[tuple[Path, int], float] | None = None

    def read(self) -> Reading:
        """Look for a profile's report, then for a check; their JSON is read once."""
        found = ReadingBuilder(self.name, [METRIC], process=self._process)
        run = self._given or newest_run()
        if run is None:
            return found.build(otherwise="there is no run under runs/; give run_dir")
        profiles = sorted(
            (path for pattern in PROFILES for path in run.glob(pattern)), key=_changed_at
        )
        candidates: list[tuple[Path, Callable[[Any], float]]] = [
            *((path, _measured_share) for path in reversed(profiles)),
            (run / CHECK_FILE, _predicted_share),
        ]
        for path, share_of in candidates:
            origin = "measured" if share_of is _measured_share else "model"
            try:
                found.add(METRIC, self._share(path, share_of), labels={"origin": origin})
            except FileNotFoundError:
                continue
            except UNREADABLE as error:
                found.lack(METRIC, f"{path} is no report that can be read ({error})")
                continue
            return found.build()
        return found.build(
            otherwise=f"{run} holds no profile and no check.json: profile a few steps to know"
        )

    def close(self) -> None:
        """Do nothing: files are opened for each reading."""

    def _share(self, path: Path, share_of: Callable[[Any], float]) -> float:
        key = (path, path.stat().st_mtime_ns)
        if self._read is None or self._read[0] != key:
            self._read = (key, share_of(json.loads(path.read_text(encoding="utf-8"))))
        return self._read[1]


def _measured_share(report: Mapping[str, Any]) -> float:
    return float(report["analysis"]["communication_bound"])


def _predicted_share(report: Mapping[str, Any]) -> float:
    """Of a check: what a core waits for chips of its slice and for other slices, over the step."""
    prediction = report["prediction"]
    waited = prediction["seconds_by_cause"]
    return (float(waited["ici"]) + float(waited["dcn"])) / float(prediction["step_time_s"])


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
