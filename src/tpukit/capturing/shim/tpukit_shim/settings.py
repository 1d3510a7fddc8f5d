"""The settings of the capture, its findings, and the attributes it replaces.

The settings are a JSON file, because the devices of a large slice do not fit into an environment
variable. Only the first process that imports jax is captured; data loaders and actors that it
starts run unchanged.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import watching

_undo: list[Callable[[], None]] = []
_MISSING = object()


def replace(owner: Any, name: str, value: Any) -> Any:
    """Set an attribute until `restore`, and return its earlier value."""
    own = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else _MISSING
    before = getattr(owner, name, None)

    def undo() -> None:
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    setattr(owner, name, value)
    _undo.append(undo)
    return before


def restore() -> None:
    """Restore every replaced attribute."""
    while _undo:
        _undo.pop()()


OWNER_VARIABLE = "TPUKIT_CAPTURE_PROCESS"
SMALL_FLOPS = 2e9
"""A program with at most this many FLOPs runs on the CPU."""
SMALL_BYTES = 64 * 2**20
"""A program or array with at most this many bytes is real."""
MOST_LISTED = 40
"""Files, reads and notes that are listed; the others are counted."""


@dataclass
class CaptureState:
    """One capture: its settings and its findings so far.

    Attributes:
        folder: Folder for the program and the findings.
        devices: Coordinates, core, slice, process and the slice's own id of each device, in the
            order of `jax.devices()`.
        kind: The device kind that jax reports on that chip.
        hbm_bytes: HBM per device.
        program: The name of the program to capture; None for the training step.
        stop_at_call: The call of the step that ends the program.
        leave_by_exception: Raise instead of ending the process, for a notebook.
        events: Calls of large programs, by name, in order.
        reads: Source lines that read the value of a recorded array, and how.
        notes: Sentences about facts that could not be determined.
    """

    folder: str
    devices: list[dict[str, Any]]
    kind: str
    hbm_bytes: int
    program: str | None = None
    stop_at_call: int = 1
    leave_by_exception: bool = False
    offline: bool = True
    flatbuffers: str = ""
    started: float = field(default_factory=time.time)
    events: list[str] = field(default_factory=list)
    reads: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    run_for_real: int = 0
    failure: str = ""

    @property
    def processes(self) -> int:
        """Processes that the slice runs, one per host."""
        return 1 + max(device["process"] for device in self.devices)

    def note(self, sentence: str) -> None:
        """Keep a sentence for the report, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def progress(self, text: str) -> None:
        """Report progress to the parent, which watches this file."""
        with open(os.path.join(self.folder, "progress.txt"), "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def findings(self) -> dict[str, Any]:
        """Return what was found, as JSON data."""
        return {
            "events": self.events,
            "reads": [
                {"line": line, "how": how} for line, how in list(self.reads.items())[:MOST_LISTED]
            ],
            "written": list(watching.written)[:MOST_LISTED],
            "written_count": len(watching.written),
            "refused": list(watching.refused)[:MOST_LISTED],
            "notes": self.notes[:MOST_LISTED],
            "run_for_real": self.run_for_real,
            "seconds": time.time() - self.started,
            "peak_bytes": 0 if self.leave_by_exception else _peak_bytes(),
        }


def _peak_bytes() -> int:
    """Return the memory of this process at its largest.

    `getrusage` would count the process that started this one, too, so it is asked only where the
    kernel has no better answer.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            peak = next(line for line in file if line.startswith("VmHWM"))
        return int(peak.split()[1]) * 1024
    except (OSError, StopIteration):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_settings() -> CaptureState | None:
    """Return the capture that the environment asks for, in the first process that imports jax."""
    path = os.environ.get(watching.SETTINGS_VARIABLE)
    if not path:
        return None
    if os.environ.setdefault(OWNER_VARIABLE, str(os.getpid())) != str(os.getpid()):
        return None
    with open(path, encoding="utf-8") as file:
        return CaptureState(**json.load(file)["state"])


def user_line() -> str:
    """Return file and line of the innermost frame that belongs to the user's own program."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    own, outermost = os.path.dirname(os.path.abspath(__file__)), ""
    while frame is not None:
        path = frame.f_code.co_filename
        installed = "site-packages" in path or "/lib/python" in path
        if path and not installed and not path.startswith((own, "<")):
            return f"{path}:{frame.f_lineno}"
        outermost = f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return outermost
