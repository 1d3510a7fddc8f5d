"""The changes that `make mutants` makes: each one different, and each one a program."""

import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOOL = REPOSITORY / "tools" / "mutants"
sys.path.insert(0, str(TOOL))

from changes import changes_of, moved  # noqa: E402
from rooms import ROOMS  # noqa: E402

SOURCE = '''"""Says nothing: 1 + 1."""
LIMIT = 3


def bounded(a: float = 0.5, *, b: float) -> float:
    """1 + 1."""
    if a < b and not a:
        raise ValueError(f"{a + 1} is {b}")
    for _ in zip([a], [b], strict=True):
        pass
    return min(a + 2 * b, LIMIT) if a else -b
'''


def changes_in(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return changes_of(tmp_path, Path(name))


def test_operators_numbers_comparisons_and_terms_change(tmp_path):
    found = changes_in(tmp_path, "a.py", SOURCE)
    assert {(one.before, one.after) for one in found} >= {
        ("3", "4"),
        ("0.5", "0.55"),
        ("a < b", "(a <= b)"),
        ("a < b and not a", "(a < b or not a)"),
        ("not a", "a"),
        ("min", "max"),
        ("a + 2 * b", "(a - 2 * b)"),
        ("a + 2 * b", "a"),
        ("2 * b", "(2 / b)"),
        ("-b", "b"),
    }
    assert not any(one.before == "True" for one in found)
    assert not any("1 + 1" in one.before or "a + 1" in one.before for one in found)
    at_import = {one.before for one in found if one.at_import}
    assert at_import == {"3", "0.5"}  # these run before any test does
    assert len({one.id for one in found}) == len(found)
    for one in found:
        compile(one.apply(SOURCE), "a.py", "exec")


def test_numbers_of_a_data_file_change_and_its_texts_do_not(tmp_path):
    text = 'date = "2026-11-15"\n# 12\nx = { value = 0.5, source = "v6", note = "3 of 4" }\nn = 7\n'
    found = changes_in(tmp_path, "a.toml", text)
    assert [(one.before, one.after) for one in found] == [("0.5", "0.55"), ("7", "8")]
    assert [tomllib.loads(one.apply(text)) for one in found]


@pytest.mark.parametrize(
    ("number", "after"), [("0", "1"), ("45", "50"), ("1_024", "1126"), ("1e-6", "1.1e-06")]
)
def test_a_number_moves_by_a_tenth_or_by_one(number, after):
    assert moved(number) == after


@pytest.mark.parametrize("name", ROOMS)
def test_every_room_has_files_and_tests(name):
    assert ROOMS[name].members(REPOSITORY)
    assert all((REPOSITORY / tests).exists() for tests in ROOMS[name].tests)


def test_changes_that_are_said_to_be_equivalent_exist_and_are_left_out():
    for same in tomllib.loads((TOOL / "equivalent.toml").read_text())["same"]:
        text = (REPOSITORY / same["file"]).read_text()
        assert same.get("line", same["before"]) in text
        assert same["why"]
        made = {(one.before, one.after) for one in changes_of(REPOSITORY, Path(same["file"]))}
        assert "line" in same or (same["before"], same["after"]) not in made
