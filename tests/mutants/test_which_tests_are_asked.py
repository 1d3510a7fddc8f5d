"""Which tests a change is tried against, and how long what came of it is good."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "mutants"))

import outcomes as kept
from changes import Change
from lines_by_test import LinesByTest
from rooms import Room
from trials import Trial

FILE = Path("src/a.py")
KNOWN = LinesByTest(
    seconds={"t/a.py::slow": 3.0, "t/a.py::other": 0.5, "t/a.py::quick": 1.0, "t/b.py::file": 0.1,
             "t/c.py::none": 0.0},
    lines={"t/a.py::slow": {"src/a.py": [4, 5]}, "t/a.py::other": {}, "t/c.py::none": {},
           "t/a.py::quick": {"src/a.py": [6]}, "t/b.py::file": {"src/a.py": [9]}},
    when_collected={"src/a.py": [12]},
)  # fmt: skip


@pytest.mark.parametrize(
    ("line", "before", "expected"),
    [
        (5, "x", ["t/a.py::slow", "t/a.py::other", "t/a.py::quick"]),
        (5, "x\ny", ["t/a.py::quick", "t/a.py::slow", "t/a.py::other"]),  # of two lines
        (7, "x", []),  # nothing runs it, so nothing can notice
        (12, "x", ["t/b.py::file", "t/a.py::quick", "t/a.py::slow", "t/c.py::none",
                   "t/a.py::other"]),  # at import: everything, those that run the file first
    ],
)  # fmt: skip
def test_a_change_asks_the_tests_that_run_it(line, before, expected):
    assert KNOWN.in_order(Change(FILE, line, 0, before, "z")) == expected


@pytest.fixture
def repository(tmp_path):
    for name in ("src/a.py", "t/a.py", "t/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("trial", "stays", "ends"),
    [
        (Trial("noticed", "t/a.py::test[x]"), "t/b.py", "t/a.py"),
        (Trial("noticed", "t/a.py::test[x]"), "t/b.py", "src/a.py"),
        (Trial("survived"), "elsewhere.py", "t/b.py"),
    ],
)
def test_an_outcome_is_good_while_what_it_came_from_stays(repository, trial, stays, ends):
    change = Change(FILE, 1, 0, "x", "y")

    def found():
        kept._hash_of.cache_clear()
        room = Room(("src/*.py",), ("t",))
        return kept.Outcomes(repository, room, repository / "kept" / "room.json")

    found().store(change, trial)
    (repository / stays).write_text("another")
    assert found().find(change) == trial
    (repository / ends).write_text("another still")
    assert found().find(change) is None
