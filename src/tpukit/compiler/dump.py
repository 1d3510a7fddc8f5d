"""The files one compile leaves in its dump folder: which there are, and when they are whole.

libtpu for jax 0.10 writes them one after another from one thread, so a file is whole as soon as the
next one exists. In order: the scheduled program, the buffer assignment, the live ranges, the memory
report; then, only if the program was found to fit, the program once more; minutes later, generated
code. From jax 0.11 on, several threads write the first four at once, in any order.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import XLACompilationError

# The name jax gives the program that calls an exported one; libtpu also dumps small helpers.
PROGRAM = "jit_call"
_SCHEDULE = "after_optimizations.txt"
_ASSIGNMENT = "after_optimizations-buffer-assignment.txt"
_LIVE_RANGES = "after_optimizations-live-range.txt"
_REPORT = "after_optimizations-memory-usage-report.txt"
_ACCEPTED = "after_optimizations_after_buffer_assignment.txt"
_HBM_TOTAL = re.compile(r"Memory Space: default .*\nTotal bytes: (\d+) ")
_QUIET_S = 1.0  # a file that nothing was written to for so long is taken to be whole
_SURELY = 0.999  # of what is usable, which the catalog states in hundredths of a GiB


@dataclass(frozen=True)
class Listings:
    """What the compiler wrote about a scheduled program.

    Attributes:
        hlo: The scheduled program, before code generation.
        assignment: Every allocation with the values that lie in it.
        live_ranges: When each value is alive, as positions in one flat schedule.
        devices: Place on the torus and slice number of each device, in the program's order.
    """

    hlo: str
    assignment: str
    live_ranges: str
    devices: str


@dataclass(frozen=True)
class Dump:
    """A folder that one compile writes into.

    Attributes:
        constants: Whether arrays of constants are written out, such as the tables in which kernels
            list what they visit.
    """

    folder: Path
    constants: bool = False

    @property
    def options(self) -> dict[str, object]:
        """The compiler options that make it write there."""
        return {
            "xla_dump_to": str(self.folder),
            "xla_dump_hlo_as_text": True,
            "xla_dump_large_constants": self.constants,
        }

    @property
    def devices_path(self) -> Path:
        """Where the child writes the coordinates of the devices before it compiles."""
        return self.folder / "devices.json"

    @property
    def scheduled(self) -> bool:
        """Whether the compiler has fixed order and addresses; the program may still not fit."""
        return self._path(_REPORT) is not None

    @property
    def accepted(self) -> bool:
        """Whether the program fits, and every file read by `listings` is whole."""
        return self._path(_ACCEPTED) is not None

    def leaves_room(self, usable_bytes: float | None) -> bool:
        """Whether the memory report, by which the compiler judges, surely lets the program fit.

        Its word may come minutes later: for TPU7x it makes the SparseCores' code first.
        """
        report = self._path(_REPORT)
        if usable_bytes is None or report is None or not self._are_whole(report):
            return False
        total = _HBM_TOTAL.search(report.read_text(errors="replace"))
        return total is not None and int(total[1]) <= _SURELY * usable_bytes

    def _are_whole(self, report: Path) -> bool:
        """Whether the other files were written before the report, or are no longer written to."""
        endings = (_SCHEDULE, _ASSIGNMENT, _LIVE_RANGES)
        others = [path for ending in endings if (path := self._path(ending)) is not None]
        if len(others) < len(endings) or not _tail(others[0]).rstrip().endswith(b"}"):
            return False
        last, reported = max(path.stat().st_mtime for path in others), report.stat().st_mtime
        return last <= reported or time.time() - last > _QUIET_S

    def listings(self) -> Listings:
        """Read the files; call it once `accepted` or `leaves_room`, or when the compiler has ended.

        Raises:
            XLACompilationError: A file is missing or cut short.
        """
        report = self._read(_REPORT)
        listings = Listings(
            hlo=self._read(_SCHEDULE),
            assignment=self._read(_ASSIGNMENT),
            live_ranges=self._read(_LIVE_RANGES),
            devices=self.devices_path.read_text(),
        )
        if "Total bytes:" not in report or not listings.hlo.rstrip().endswith("}"):
            raise XLACompilationError(
                "what the compiler wrote about this program is cut short; "
                "free some space in the temporary folder and compile again."
            )
        return listings

    def _path(self, ending: str) -> Path | None:
        return next(self.folder.glob(f"*.{PROGRAM}.*.{ending}"), None)

    def _read(self, ending: str) -> str:
        path = self._path(ending)
        if path is None:
            raise XLACompilationError(
                f"the compiler wrote no '{ending}' for this program; the temporary folder may be "
                "full, or this libtpu names its files in another way."
            )
        return path.read_text(errors="replace")


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read()


_KERNEL_MARK = re.compile(r"/\* entry bundle: [^*]*custom-call\(")
_KERNEL_LISTING = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")


@dataclass(frozen=True)
class KernelDump:
    """A folder that gets the final bundles of everything one compile makes code for."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What the compiling child needs: these are flags of libtpu, not options of a compile."""
        return {
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={self.folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=^final_bundles$"
        }

    def listings(self) -> Mapping[str, str]:
        """The listing of each custom call, by the name of the instruction it is the code of."""
        found: dict[str, str] = {}
        for path in sorted(self.folder.glob("*-final_bundles.txt")):
            match = _KERNEL_LISTING.fullmatch(path.name)
            text = path.read_text(errors="replace") if match is not None else ""
            if match is not None and _KERNEL_MARK.search(text):
                found[match[1]] = text
        return found
