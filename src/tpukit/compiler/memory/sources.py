"""Map a stack frame number of a program to its line of source."""

import re
from dataclasses import dataclass
from pathlib import Path

_TABLE = re.compile(r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", re.MULTILINE)
_NUMBER = re.compile(r"\d+")
# Frames of this package's own machinery around the user's function.
# By their full names inside the package, because a user's own folder may be called `compiler`.
_MACHINERY = tuple(
    f"/tpukit/{file}"
    for file in ("compiler/worker.py", "compiler/program/lowered.py", "runtime/child.py")
)
_LIBRARIES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class SourceTable:
    """The stack frames listed at the head of a program.

    Attributes:
        frames: File, line and calling frame of each frame by number.
    """

    frames: dict[int, tuple[str, int, int]]

    def line_of(self, frame: int | None) -> str | None:
        """Return the innermost line of the user's code, as "file.py:12"; else a library's line."""
        innermost: str | None = None
        seen: set[int] = set()
        while frame in self.frames and frame not in seen:
            seen.add(frame)
            file, line, caller = self.frames[frame]
            if file.endswith(_MACHINERY) or file.startswith("<frozen"):
                break
            here = f"{_short(file)}:{line}"
            if not any(part in _LIBRARIES for part in Path(file).parts):
                return here
            innermost = innermost or here
            frame = caller
        return innermost


def parse_sources(hlo: str) -> SourceTable:
    """Parse the tables; a program printed without them has no lines."""
    tables = {found[1]: found[2].splitlines() for found in _TABLE.finditer(hlo)}
    files: dict[int, str] = {}
    for entry in tables.get("FileNames", []):
        number, _, name = entry.partition(" ")
        files[int(number)] = name.strip('"')
    lines: dict[int, tuple[str, int]] = {}
    for entry in tables.get("FileLocations", []):
        number, file, _function, line, *_ = map(int, _NUMBER.findall(entry))
        lines[number] = (files.get(file, "?"), line)
    frames: dict[int, tuple[str, int, int]] = {}
    for entry in tables.get("StackFrames", []):
        number, location, caller = map(int, _NUMBER.findall(entry))
        # The compiler prints the caller's number plus one, so that 1 means "none".
        frames[number] = (*lines.get(location, ("?", 0)), caller - 1)
    return SourceTable(frames)


def _short(file: str) -> str:
    """Shorten a path: relative to the working folder, or from the package on."""
    path = Path(file)
    for root in (Path.cwd(), *(parent for parent in path.parents if parent.name in _LIBRARIES)):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return "/".join(path.parts[-3:])
