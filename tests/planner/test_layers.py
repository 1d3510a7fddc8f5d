"""The planner's folders import one way: cost, then search, then answer."""

import re
from pathlib import Path

import tpukit.planner

PLANNER = Path(tpukit.planner.__file__).parent


def test_folders_import_one_way():
    later = {"cost": "search|answer", "search": "answer"}
    upwards = [
        f"{path.name}: {line}"
        for folder, others in later.items()
        for path in (PLANNER / folder).glob("*.py")
        for line in path.read_text().splitlines()
        if re.match(rf"\s*from \.\.({others})\b", line)
    ]
    assert not upwards
