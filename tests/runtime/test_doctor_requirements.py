"""Requirement lines of installed packages: their extra, and the versions they exclude."""

from importlib.metadata import distributions

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.runtime.doctor.software import is_excluded, parse_requirement


@pytest.mark.parametrize(
    ("version", "specifier", "excluded"),
    [
        ("0.0.42.1", "==0.0.42.*", False),
        ("0.0.41", "==0.0.42.*", True),
        ("0.10.2", "<=0.10.2,>=0.10.1", False),
        ("0.11.0rc1", ">=0.10,<0.13", False),
        ("0.10", "@ file", False),  # nothing is claimed of what cannot be read
        ("some build", ">=1", False),
        ("1.0", "", False),
    ],
)
def test_a_specifier_excludes_versions(version, specifier, excluded):
    assert is_excluded(version, specifier) is excluded


def test_every_requirement_installed_here_is_read():
    lines = {line for found in distributions() for line in found.requires or []}
    assert len(lines) > 50
    assert all(parse_requirement(line)[0] is not None for line in lines)


def test_extras_are_told_apart():
    assert parse_requirement('libtpu==0.0.42.*; extra == "tpu"')[1] == "tpu"
    assert parse_requirement("jaxlib<=0.10.2,>=0.10.1")[1] is None


@given(st.text())
def test_no_line_breaks_the_reader(line):
    parse_requirement(line)
    is_excluded(line, line)
