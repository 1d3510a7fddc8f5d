"""What XProf itself says of a recording, where it is installed and has something to say.

Its converters are native code that logs much and keeps caches beside what it reads, so they run in
a child, on copies.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from ...errors import MissingExtraError
from ...runtime.child import ChildError, run_child
from ...runtime.files import temporary_folder
from .recording import Recording

TIMEOUT_S = 120


@dataclass(frozen=True)
class XprofFigures:
    """Figures by name, or the reason why there are none."""

    figures: Mapping[str, str] = field(default_factory=dict[str, str])
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"figures": dict(self.figures), "reason": self.reason}


def xprof_figures(recording: Recording | None, *, timeout_s: float = TIMEOUT_S) -> XprofFigures:
    """Ask XProf for its overview of a recording."""
    if recording is None:
        return XprofFigures(reason="nothing was recorded")
    tracks = [track for host in recording.hosts for track in host.devices]
    if all(track.platform == "CPU" for track in tracks):
        return XprofFigures(reason="XProf looks at TPUs and GPUs, and this ran on a CPU")
    if find_spec("xprof") is None:
        missing = MissingExtraError("profile", needed_for="XProf's overview", module="xprof")
        return XprofFigures(reason=str(missing).rstrip("."))
    with temporary_folder("tpukit-xprof-") as folder:
        copies = [shutil.copy(host.path, folder / host.path.name) for host in recording.hosts]
        request = {"files": [str(copy) for copy in copies]}
        try:
            reply = run_child(f"{__package__}.xprof_child", request, timeout_s=timeout_s)
        except ChildError as error:
            return XprofFigures(reason=f"XProf failed ({error})")
    if not reply["figures"]:
        return XprofFigures(reason="its overview of this file is empty")
    return XprofFigures(reply["figures"])
