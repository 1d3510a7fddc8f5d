"""Requirement lines are read as `packaging`, the reference, reads them."""

from importlib.metadata import distributions

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement as Reference
from packaging.specifiers import SpecifierSet

from tpukit.runtime.doctor.requirements import parse_requirement, satisfies

RELEASES = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(
    lambda parts: ".".join(map(str, parts))
)
CLAUSES = st.one_of(
    st.tuples(st.sampled_from(["==", "!=", "<=", ">=", "<", ">"]), RELEASES).map("".join),
    st.tuples(st.sampled_from(["==", "!="]), RELEASES, st.just(".*")).map("".join),
    st.tuples(st.just("~="), RELEASES.filter(lambda text: "." in text)).map("".join),
)


@given(RELEASES, st.lists(CLAUSES, max_size=3).map(",".join))
def test_satisfies_as_packaging_does(version, specifier):
    assert satisfies(version, specifier) == SpecifierSet(specifier).contains(version)


@pytest.mark.parametrize(
    ("version", "specifier"), [("0.11.0rc1", ">=0.10"), ("0.10", "@ file"), ("1", "==1.0+local")]
)
def test_nothing_is_claimed_of_what_is_more_than_numbers(version, specifier):
    assert satisfies(version, specifier) is None


def test_every_requirement_installed_here_is_read_as_packaging_reads_it():
    lines = {line for found in distributions() for line in found.requires or []}
    assert len(lines) > 50
    for line in lines:
        ours, reference = parse_requirement(line), Reference(line)
        if reference.url:
            continue
        assert ours is not None, line
        assert ours.name == reference.name.lower()
        assert SpecifierSet(ours.specifier) == reference.specifier, line


def test_extras_are_told_apart():
    assert parse_requirement('libtpu==0.0.42.*; extra == "tpu"').extra == "tpu"
    assert parse_requirement("jaxlib<=0.10.2,>=0.10.1").extra is None
    assert parse_requirement("jaxlib @ file:///jaxlib.whl") is None


@given(st.text())
def test_no_line_breaks_the_reader(line):
    parse_requirement(line)
    satisfies(line, line)
