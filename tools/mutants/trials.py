"""Run the tests of a room against changed copies of its files, never against the tree itself."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from changes import Change
from rooms import Room

Outcome = Literal["noticed", "survived", "too slow"]
LEFT_BEHIND = (".git", ".venv", ".cache", ".pytest_cache", ".ruff_cache", "__pycache__", "build")
# The real TPU compiler takes minutes; what it alone would notice stands under no test here.
QUICK = "not slow and not tpu and not libtpu and not browser"
FIRST_TESTS = 25  # most changes fall by the first few
NOTHING_RAN = 5
LEAST_TIMEOUT_S, SLOWER = 120.0, 5  # than the same tests unchanged: it hangs, or this machine does


@dataclass(frozen=True)
class Copy:
    """A copy of the repository in which files may be changed.

    Attributes:
        root: Where it lies.
        python: Of the environment the tests run in.
    """

    root: Path
    python: Path

    @classmethod
    def of(cls, repository: Path, to: Path) -> "Copy":
        """Copy a repository."""
        shutil.copytree(repository, to, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
        return cls(to, Path(sys.executable))

    def pytest(self, *arguments: str, timeout_s: float | None = None) -> tuple[int | None, str]:
        """Run pytest in the copy; its exit code, None when it took too long, and what it said."""
        path = f"{self.root / 'src'}:{Path(__file__).parent}"
        own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        always = ["-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", QUICK]
        try:
            ended = subprocess.run(
                [self.python, "-m", "pytest", *always, *arguments],
                cwd=self.root,
                env={**os.environ, **own},
                text=True,
                capture_output=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return None, ""
        return ended.returncode, ended.stdout + ended.stderr

    def lines_by_test(self, room: Room) -> "LinesByTest":
        """Which lines every test of a room runs.

        Raises:
            RuntimeError: The tests fail although nothing was changed.
        """
        to = self.root / "lines.json"
        code, said = self.pytest(
            "-p", "lines_by_test", "--lines-of", str(self.root), "--lines-to", str(to), *room.tests
        )
        if code != 0:
            raise RuntimeError(f"the tests fail before anything is changed:\n{said[-2000:]}")
        return LinesByTest(json.loads(to.read_text()))

    def try_change(self, change: Change, known: "LinesByTest") -> Outcome:
        """Whether one of the tests notices a change; the file is as it was afterwards."""
        path = self.root / change.file
        text = path.read_text("utf-8")
        path.write_text(change.apply(text), "utf-8")
        wanted = known.in_order(change)
        try:
            for some in (wanted[:FIRST_TESTS], wanted[FIRST_TESTS:]):
                usual = sum(known.tests[name]["seconds"] for name in some)
                timeout_s = LEAST_TIMEOUT_S + SLOWER * usual
                code, _ = self.pytest("-x", *some, timeout_s=timeout_s) if some else (0, "")
                if code is None:
                    return "too slow"
                if code not in (0, NOTHING_RAN):
                    return "noticed"
            return "survived"
        finally:
            path.write_text(text, "utf-8")


class Ran(TypedDict):
    """What one test ran."""

    seconds: float
    lines: dict[str, list[int]]


@dataclass(frozen=True)
class LinesByTest:
    """What each test ran, by its name."""

    tests: dict[str, Ran]

    def in_order(self, change: Change) -> list[str]:
        """Every test, those that run the changed line first and of those the fastest.

        What is cached runs in the first test that asks for it, so that others may notice too.
        """
        file = str(change.file)
        last = change.line + change.before.count("\n")

        def rank(name: str) -> tuple[bool, float]:
            lines = self.tests[name]["lines"].get(file, ())
            runs = any(change.line <= line <= last for line in lines)
            return not runs, self.tests[name]["seconds"]

        return sorted(self.tests, key=rank)
