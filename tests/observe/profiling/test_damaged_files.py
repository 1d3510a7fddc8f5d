"""Files that are cut, changed or something else altogether: a clear error, or a reading."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import TPUValidationError
from tpukit.observe.profiling.hlo_proto import programs_in, read_program
from tpukit.observe.profiling.profile import read_newest, read_profile
from tpukit.observe.profiling.reading import find_recordings


@pytest.fixture(scope="module")
def content(recorded):
    (path,) = recorded("compute").profiles()[-1].recording.folder.glob("*.xplane.pb")
    return path.read_bytes()


def outcome(path):
    """What a user gets: an analysis, or a sentence."""
    try:
        profile = read_profile(path)
        assert sum(profile.analysis.shares.values()) == pytest.approx(1.0)
        assert profile.step.steps >= 1
    except TPUValidationError:
        return "refused"
    return "read"


def test_a_cut_file_is_refused_wherever_it_was_cut(content, tmp_path):
    path = tmp_path / "cut.xplane.pb"
    rng = random.Random(1)
    for length in [0, 1, 2, 10, *(rng.randrange(len(content)) for _ in range(40))]:
        path.write_bytes(content[:length])
        assert outcome(path) == "refused", length
    path.write_bytes(content)
    assert outcome(path) == "read"


def test_changed_bytes_never_end_the_process(content, tmp_path):
    path = tmp_path / "changed.xplane.pb"
    rng = random.Random(2)
    # The programs lie somewhere in the file: some of the damage falls into them.
    (_, program), *_ = sorted(programs_in(content), key=lambda one: -len(one[1]))
    at = content.index(program)
    seen = {"read": 0, "refused": 0}
    for number in range(120):
        changed = bytearray(content)
        low, high = (at, at + len(program)) if number % 2 else (0, len(content))
        place = rng.randrange(low, high)
        if number % 3 == 0:
            del changed[place : place + rng.randrange(1, 20)]
        elif number % 3 == 1:
            changed[place:place] = rng.randbytes(rng.randrange(1, 20))
        for _ in range(rng.choice((1, 1, 3, 20))):
            changed[rng.randrange(low, high - 20)] = rng.randrange(256)
        path.write_bytes(changed)
        seen[outcome(path)] += 1
    assert seen["read"]
    assert seen["refused"]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_programs_or_an_error(data):
    with contextlib.suppress(TPUValidationError):
        assert all(isinstance(name, str) for name, _ in programs_in(data))
    with contextlib.suppress(TPUValidationError):
        program, _ = read_program(data)
        assert program.entry_name in program.computations


def test_what_is_no_profile_says_what_was_expected(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(TPUValidationError, match=r"contains no profile.*TPUProfiler"):
        find_recordings(tmp_path / "empty")
    with pytest.raises(TPUValidationError, match="does not exist"):
        find_recordings(tmp_path / "missing")
    text = tmp_path / "notes.txt"
    text.write_text("not a profile")
    with pytest.raises(TPUValidationError, match="no profile that can be read"):
        read_newest(text)


def test_a_recording_without_ops_says_so(tmp_path):
    from xplanes import Event, Plane, xspace

    path = tmp_path / "idle.xplane.pb"
    path.write_bytes(xspace(Plane("/host:CPU", {"python": [Event("$a.py:1 f", 0, 10)]})))
    with pytest.raises(TPUValidationError, match="no device ran anything"):
        _ = read_profile(path).analysis
