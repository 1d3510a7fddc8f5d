"""The files in one compile's dump folder: which exist, and when they are complete.

libtpu for jax 0.10 writes the files one after another from one thread, so a file is complete as
soon as the next one exists. The order is: scheduled program, buffer assignment, live ranges, memory
report; then, only if the program fits, the program once more; minutes later, generated code. From
jax 0.11 on, several threads write the first four at once, in any order.
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
_QUIET_S = 1.0  # a file that was not written to for this long counts as complete
_SURELY = 0.999  # of the usable HBM, which the catalog rounds to hundredths of a GiB


@dataclass(frozen=True)
class Listings:
    """The compiler's listings of a scheduled program.

    Attributes:
        hlo: The scheduled program, before code generation.
        assignment: Every allocation with the values in it.
        live_ranges: When each value is alive, as positions in one flat schedule.
        devices: Torus coordinates and slice number of each device, in the program's order.
    """

    hlo: str
    assignment: str
    live_ranges: str
    devices: str


@dataclass(frozen=True)
class Dump:
    """A folder that one compile writes into.

    Attributes:
        constants: Whether constant arrays are dumped, such as a kernel's table of visited blocks.
    """

    folder: Path
    constants: bool = False

    @property
    def options(self) -> dict[str, object]:
        """Compiler options that make the compiler write into the folder."""
        return {
            "xla_dump_to": str(self.folder),
            "xla_dump_hlo_as_text": True,
            "xla_dump_large_constants": self.constants,
        }

    @property
    def devices_path(self) -> Path:
        """File into which the child writes the devices' coordinates before it compiles."""
        return self.folder / "devices.json"

    @property
    def scheduled(self) -> bool:
        """Whether order and addresses are fixed; the program may still not fit."""
        return self._path(_REPORT) is not None

    @property
    def accepted(self) -> bool:
        """Whether the program fits and every file that `listings` reads is complete."""
        return self._path(_ACCEPTED) is not None

    def leaves_room(self, usable_bytes: float | None) -> bool:
        """Whether the memory report shows that the program fits for certain.

        The compiler's own verdict may come minutes later: for TPU7x it first generates SparseCore
        code.
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
        """Read the files, once `accepted` or `leaves_room` is true or the compiler has ended.

        Raises:
            XLACompilationError: A file is missing or truncated.
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
                "the compiler's listing of this program is truncated; free some space in the "
                "temporary folder and compile again."
            )
        return listings

    def _path(self, ending: str) -> Path | None:
        return next(self.folder.glob(f"*.{PROGRAM}.*.{ending}"), None)

    def _read(self, ending: str) -> str:
        path = self._path(ending)
        if path is None:
            raise XLACompilationError(
                f"the compiler wrote no '{ending}' for this program; the temporary folder may be "
                "full, or this libtpu uses other file names."
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
    """A folder for the final bundles of everything that one compile generates code for."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the compiling child; these are libtpu flags, not compiler options."""
        return {
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={self.folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=^final_bundles$"
        }

    def listings(self) -> Mapping[str, str]:
        """Return the listing of each custom call, by the name of its instruction."""
        found: dict[str, str] = {}
        for path in sorted(self.folder.glob("*-final_bundles.txt")):
            match = _KERNEL_LISTING.fullmatch(path.name)
            text = path.read_text(errors="replace") if match is not None else ""
            if match is not None and _KERNEL_MARK.search(text):
                found[match[1]] = text
        return found
