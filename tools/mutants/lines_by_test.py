"""Which lines each test runs, so that a change asks only those tests that can notice it."""

import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from changes import Change

Lines = dict[str, list[int]]


@dataclass(frozen=True)
class LinesByTest:
    """What the tests of a room ran.

    Attributes:
        seconds: Of each test, by its name.
        lines: Of each test, by file.
        when_collected: What ran before any test did, when modules were imported.
    """

    seconds: dict[str, float]
    lines: dict[str, Lines]
    when_collected: Lines

    def in_order(self, change: Change) -> list[str]:
        """The tests that can notice a change, the likeliest and fastest first.

        A line that only runs at import, or a figure of a data file, may be noticed anywhere. Any
        other change asks the tests that run it, and, because fixtures run in the first test that
        wants them, the other tests of those files.
        """
        anywhere = change.at_import or self._runs(self.when_collected, change)
        file = str(change.file)
        likely = {
            name
            for name, lines in self.lines.items()
            if (file in lines if anywhere else self._runs(lines, change))
        }
        files = {name.partition("::")[0] for name in likely}
        return sorted(
            (name for name in self.seconds if anywhere or name.partition("::")[0] in files),
            key=lambda name: (name not in likely, self.seconds[name]),
        )

    @staticmethod
    def _runs(lines: Lines, change: Change) -> bool:
        last = change.line + change.before.count("\n")
        return any(change.line <= line <= last for line in lines.get(str(change.file), ()))


class Watch:
    """A pytest plugin that writes down which lines of some files run.

    Args:
        root: Of the repository.
        files: Relative to it.
    """

    def __init__(self, root: Path, files: list[Path]) -> None:
        self._root = str(root)
        self._files = {str(root / file): str(file) for file in files}
        self._now: dict[str, set[int]] = defaultdict(set)
        self._when_collected: dict[str, set[int]] = defaultdict(set)
        self._seconds: dict[str, float] = {}
        self._lines: dict[str, Lines] = {}

    def found(self) -> LinesByTest:
        """What was written down."""
        return LinesByTest(self._seconds, self._lines, _sorted(self._when_collected))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Iterator[None]:
        """Watch what runs while test modules are imported."""
        with self._watching(self._when_collected):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Watch one test with its fixtures."""
        self._forget_cached()
        self._now.clear()
        began = time.process_time()
        try:
            with self._watching(self._now):
                return (yield)
        finally:
            self._seconds[item.nodeid] = round(time.process_time() - began, 3)
            self._lines[item.nodeid] = _sorted(self._now)

    @contextmanager
    def _watching(self, into: dict[str, set[int]]) -> Iterator[None]:
        def on_call(frame: FrameType, event: str, argument: Any) -> Any:
            file = self._files.get(frame.f_code.co_filename)
            if file is None:
                return None
            add = into[file].add

            def on_line(frame: FrameType, event: str, argument: Any) -> Any:
                add(frame.f_lineno)
                return on_line

            add(frame.f_lineno)
            return on_line

        threading.settrace(on_call)
        sys.settrace(on_call)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def _forget_cached(self) -> None:
        """Forget what functions have cached, so that each test runs all it depends on."""
        for module in list(sys.modules.values()):
            if str(getattr(module, "__file__", None)).startswith(self._root):
                for value in vars(module).values():
                    if isinstance(value, functools._lru_cache_wrapper):
                        value.cache_clear()


def _sorted(lines: dict[str, set[int]]) -> Lines:
    return {file: sorted(found) for file, found in lines.items()}
