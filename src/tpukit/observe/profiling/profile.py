"""A profile with everything that is read out of it: analysis, one step, memory."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...plain_data import read_json
from .analysis import BottleneckAnalysis, analysis_of
from .attribution import HostTimes, attribute
from .memory import FILE, MemoryRecord
from .reading import find_recordings, read_recording
from .recording import Recording
from .steps import MeasuredStep, measured_step


@dataclass(frozen=True)
class Profile:
    """One recording; what is made of it is made when it is asked for, once."""

    recording: Recording

    @cached_property
    def times(self) -> list[HostTimes]:
        """Where the time of each device went."""
        return attribute(self.recording)

    @cached_property
    def analysis(self) -> BottleneckAnalysis:
        """What bounds the program."""
        return analysis_of(self.recording, self.times)

    @cached_property
    def step(self) -> MeasuredStep:
        """One step of it."""
        _ = self.analysis  # says so where no device ran anything
        return measured_step(self.recording, self.times)

    @cached_property
    def memory(self) -> MemoryRecord | None:
        """The memory around the block; None where it was not recorded."""
        try:
            data: Any = read_json(self.recording.folder / FILE)
            return MemoryRecord.from_dict(data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # not recorded, or half written when the program ended


def read_profile(path: Path) -> Profile:
    """Read one recording: a folder with the files of its hosts, or a single file.

    Raises:
        TPUValidationError: A file cannot be read, or is cut short or damaged.
    """
    return Profile(read_recording(path))


def read_newest(path: Path) -> Profile:
    """Read the newest recording below a folder.

    Args:
        path: A file, what `TPUProfiler` or `jax.profiler` was given, or a run directory.

    Raises:
        TPUValidationError: There is none, or a file is cut short or damaged.
    """
    return read_profile(find_recordings(path)[-1])
