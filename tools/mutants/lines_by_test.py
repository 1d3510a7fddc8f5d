"""A pytest plugin that writes down which lines each test runs, so that a change asks only those."""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines-of", help="the folder whose files are watched")
    parser.addoption("--lines-to", help="the JSON file that is written")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--lines-to"):
        folder, to = config.getoption("--lines-of"), config.getoption("--lines-to")
        config.pluginmanager.register(_Watch(folder, Path(to)))


class _Watch:
    def __init__(self, folder: str, to: Path) -> None:
        self._folder, self._to = folder, to
        self._lines: dict[str, set[int]] = defaultdict(set)
        self._tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._lines.clear()
        began = time.perf_counter()
        sys.settrace(self._on_call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            seconds = time.perf_counter() - began
            lines = {file: sorted(found) for file, found in self._lines.items()}
            self._tests[item.nodeid] = {"seconds": round(seconds, 3), "lines": lines}

    def pytest_sessionfinish(self) -> None:
        self._to.write_text(json.dumps(self._tests))

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(self._folder):
            return None
        lines = self._lines[file[len(self._folder) :].lstrip("/")]

        def on_line(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return on_line

        lines.add(frame.f_lineno)
        return on_line
