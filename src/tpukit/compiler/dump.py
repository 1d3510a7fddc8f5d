"""The files the compiler leaves in its dump folder, in the order in which they appear."""

from dataclasses import dataclass
from pathlib import Path

# Stages of a compile, each known by the file that marks its end.
STAGES = {
    "optimize": "after_optimizations.txt",
    "memory": "after_optimizations-memory-usage-report.txt",
    "schedule": "after_optimizations_after_buffer_assignment.txt",
    "codegen": "after_codegen.txt",
}


@dataclass(frozen=True)
class Dump:
    """A folder that one compile writes into.

    Attributes:
        folder: Where the compiler writes.
        program: Name of the main program; libtpu also dumps small helpers.
    """

    folder: Path
    program: str

    @property
    def options(self) -> dict[str, object]:
        """The compiler options that make it write there."""
        return {"xla_dump_to": str(self.folder), "xla_dump_hlo_as_text": True}

    def path(self, suffix: str) -> Path | None:
        """The main program's file with that ending, if it is there."""
        found = sorted(self.folder.glob(f"*.{self.program}.*.{suffix}"))
        return found[-1] if found else None

    def read(self, suffix: str) -> str | None:
        """Its text, if it is there."""
        path = self.path(suffix)
        return None if path is None else path.read_text(errors="replace")

    def reached(self, stage: str) -> bool:
        """Whether the compile has written all that `stage` gives.

        A file appears before it is complete, but files are written one after another: the
        next stage's file, or an unchanged size, tells that this one is whole.
        """
        names = list(STAGES)
        path = self.path(STAGES[stage])
        if path is None:
            return False
        later = names[names.index(stage) + 1 :]
        return any(self.path(STAGES[name]) for name in later) or _settled(path)


def _settled(path: Path, *, quiet_s: float = 0.3) -> bool:
    import time

    age = time.time() - path.stat().st_mtime
    return age > quiet_s and path.stat().st_size > 0
