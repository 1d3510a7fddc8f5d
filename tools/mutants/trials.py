"""Try changes in copies of the repository, never in the tree itself."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from changes import Change
from forked_pytest import run_pytest
from lines_by_test import LinesByTest
from rooms import Room

LEFT_BEHIND = (".git", ".venv", ".cache", ".pytest_cache", ".ruff_cache", "__pycache__", "build")
FIRST_TESTS = 25  # most changes fall by the first few, and need not collect the others
LEAST_LIMIT_S, SLOWER = 30.0, 5  # processor time, than the same tests unchanged: it hangs
AWAY_S = 1000  # how far the time of a changed file is from the one its bytecode names


@dataclass(frozen=True)
class Trial:
    """What came of a change.

    Attributes:
        outcome: A test that never ends is one that fails.
        by: The test that noticed.
    """

    outcome: Literal["noticed", "survived"]
    by: str | None = None


@dataclass(frozen=True)
class Copy:
    """A copy of the repository in which files may be changed.

    Attributes:
        root: Where it lies.
    """

    root: Path

    @classmethod
    def of(cls, repository: Path, to: Path) -> "Copy":
        """Copy a repository."""
        shutil.copytree(repository, to, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
        return cls(to)

    def lines_by_test(self, room: Room) -> LinesByTest:
        """Which lines every test of a room runs.

        Raises:
            RuntimeError: The tests fail although nothing was changed.
        """
        ended, lines = run_pytest(self.root, [*room.tests], lines_of=room.members(self.root))
        if not ended.passed:
            raise RuntimeError(f"the tests fail before anything is changed:\n{ended.said}")
        return lines

    def try_change(self, change: Change, known: LinesByTest) -> Trial:
        """Whether one of the tests notices a change; the file is as it was afterwards."""
        path = self.root / change.file
        text, was = path.read_text("utf-8"), path.stat()
        path.write_text(change.apply(text), "utf-8")
        os.utime(path, (was.st_atime, was.st_mtime + AWAY_S))
        try:
            return self._ask(known.in_order(change), known)
        finally:
            path.write_text(text, "utf-8")
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))

    def _ask(self, tests: list[str], known: LinesByTest) -> Trial:
        for some in (tests[:FIRST_TESTS], tests[FIRST_TESTS:]):
            if some:
                usual_s = sum(known.seconds[name] for name in some)
                ended, _ = run_pytest(
                    self.root, ["-x", *some], limit_s=LEAST_LIMIT_S + SLOWER * usual_s
                )
                if not ended.passed:
                    return Trial("noticed", ended.failed)
        return Trial("survived")
