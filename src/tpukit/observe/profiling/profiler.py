"""`TPUProfiler`: record a block of a program, analyze what bounds it, and write a page."""

import json
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import TPUValidationError
from ...plain_data import JsonMapping
from ...runtime.files import try_output_folder
from .analysis import BottleneckAnalysis, analyze_predicted
from .profile import MemoryRecord, Profile, read_memory, read_profile
from .reading import ENDING, find_recordings
from .steps import PredictedStep, predicted_step
from .tracing import folder_of, only_one, trace

if TYPE_CHECKING:
    from ...checker.result import CheckResult
    from ...compiler.timeline import StepPrediction


class TPUProfiler:
    """Records devices and host on TPU, GPU and CPU, and analyzes what bounds a program.

    Traces have the layout of jax: `tensorboard --logdir OUTPUT_DIR` and XProf read them.

    Args:
        output_dir: Output folder, with one folder per recording name and the page.
        capture_memory: Whether to record the memory of devices before and after a block, and jax's
            list of allocations (for `pprof`).
        capture_compute: Whether to record a trace.
        predicted: A predicted step to compare with, or to analyze without a recording: the result
            of `tpukit.check`, its report or report file, or a `StepPrediction`.
        python_calls: Whether to trace Python functions. They show what a device waits for, and cost
            the host some time.

    Example:
        >>> profiler = TPUProfiler(output_dir="profiles/")
        >>> with profiler.profile("train_step"):
        ...     loss = train_step(params, batch)
        >>> profiler.analyze_bottlenecks()["compute_bound"]
    """

    def __init__(
        self,
        output_dir: str | Path = "profiles",
        capture_memory: bool = True,
        capture_compute: bool = True,
        *,
        predicted: "CheckResult | StepPrediction | JsonMapping | Path | str | None" = None,
        python_calls: bool = True,
    ) -> None:
        if not (capture_memory or capture_compute):
            raise TPUValidationError(
                "there is nothing to record: capture_memory and capture_compute are both off."
            )
        self.output_dir = Path(output_dir)
        self.capture_memory, self.capture_compute = capture_memory, capture_compute
        self.python_calls = python_calls
        self.predicted: PredictedStep | None = None
        if predicted is not None:
            self.predicted = predicted_step(predicted)
        self._profiles: dict[Path, Profile] = {}

    @contextmanager
    def profile(self, name: str = "profile") -> Generator[None]:
        """Record the block until all of its work is done.

        Args:
            name: The recording's name; any text.

        Raises:
            TPUValidationError: Another profile is being recorded, or the folder cannot be written.
        """
        with only_one(name):
            try_output_folder(self.output_dir)
            folder = self.output_dir / folder_of(name)
            known = set(self._sessions(folder))
            before = tuple(read_memory()) if self.capture_memory else ()
            recorded = trace(folder, name, python_calls=self.python_calls)
            with recorded if self.capture_compute else nullcontext():
                yield
            if self.capture_memory:
                new = sorted(set(self._sessions(folder)) - known)
                memory = MemoryRecord(before, tuple(read_memory()))
                memory.write(new[-1] if new else folder)

    @staticmethod
    def _sessions(folder: Path) -> set[Path]:
        return {file.parent for file in folder.rglob(f"*{ENDING}")}

    def profiles(self) -> list[Profile]:
        """Return all recordings in the output folder, of this object or earlier ones, oldest first.

        Raises:
            TPUValidationError: There is no recording, or a file is damaged.
        """
        for folder in find_recordings(self.output_dir):
            if folder not in self._profiles:
                self._profiles[folder] = read_profile(folder)
        return list(self._profiles.values())

    def analyze_bottlenecks(self, name: str | None = None) -> BottleneckAnalysis:
        """Analyze what bounds the program: shares that add up to one, and recommendations.

        Uses the newest recording; without one, the predicted step.

        Args:
            name: The name of the recording to use instead.

        Raises:
            TPUValidationError: There is neither, or no recording of this name.
        """
        try:
            profiles = self.profiles()
        except TPUValidationError:
            if self.predicted is None or (self.output_dir.is_dir() and self._has_files()):
                raise
            return analyze_predicted(self.predicted)
        return _choose(profiles, name).analysis

    def _has_files(self) -> bool:
        return any(self.output_dir.rglob(f"*{ENDING}"))

    def generate_report(self, path: str | Path | None = None) -> Path:
        """Write the newest recording as one HTML page, with JSON and a trace beside it.

        Args:
            path: Where to write the page; `report.html` in the output folder by default.

        Returns:
            The path of the page. The JSON ends in `.json`. The trace, of the measured step and the
                predicted one if given, ends in `.pftrace`.

        Raises:
            TPUValidationError: Nothing was recorded or predicted, or a file cannot be written.
        """
        from .page import write_page

        page = Path(path) if path is not None else self.output_dir / "report.html"
        try:
            profiles = self.profiles()
        except TPUValidationError:
            if self.predicted is None or self._has_files():
                raise
            profiles = []
        if path is None:
            try_output_folder(self.output_dir)
            self.output_dir.mkdir(parents=True, exist_ok=True)
        return write_page(profiles, self.predicted, page)


def _choose(profiles: list[Profile], name: str | None) -> Profile:
    if name is None:
        return profiles[-1]
    named = [profile for profile in profiles if profile.recording.label == name]
    if not named:
        labels = sorted({profile.recording.label for profile in profiles})
        raise TPUValidationError(
            f"no recording is called {name!r}; there are {json.dumps(labels, ensure_ascii=False)}."
        )
    return named[-1]
