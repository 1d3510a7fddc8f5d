"""Which segments make up a file: versions, gaps, overlaps, and names from strangers."""

from hypothesis import given
from hypothesis import strategies as st

from tpukit.records.segments import (
    FileSegment,
    FileVersion,
    files_in,
    newest_version,
    object_name,
    path_through,
    reach,
)

ONE, TWO = FileVersion(1, 0, 10), FileVersion(2, 0, 10)


def test_a_name_is_read_back():
    segment = FileSegment(FileVersion(12, 3, 4096), 4096, 5000)
    assert FileSegment.parse(segment.name) == segment
    assert files_in([object_name("hosts/0/steps.jsonl", segment)]) == {
        "hosts/0/steps.jsonl": [segment]
    }


def test_the_later_epoch_wins_once_it_reaches_its_base():
    old = [FileSegment(ONE, 0, 10), FileSegment(ONE, 10, 30)]
    half = [FileSegment(TWO, 0, 6)]
    assert newest_version([*old, *half]) == (ONE, old), "a rewrite that a kill cut short"
    whole = [*half, FileSegment(TWO, 6, 10)]
    assert newest_version([*old, *whole]) == (TWO, whole)
    late = FileSegment(ONE, 30, 90)  # of a writer that was given up
    assert newest_version([*old, *whole, late]) == (TWO, whole)


def test_nothing_after_a_gap_counts():
    assert reach([FileSegment(ONE, 0, 10), FileSegment(ONE, 12, 20)]) == 10
    assert newest_version([FileSegment(ONE, 5, 20)]) is None


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.data())
def test_merged_and_small_segments_have_every_byte_once(sizes, data):
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    starts = [0, *ends[:-1]]
    segments = [FileSegment(ONE, *pair) for pair in zip(starts, ends, strict=True)]
    first = data.draw(st.integers(0, len(sizes) - 1))
    last = data.draw(st.integers(first, len(sizes) - 1))
    segments.append(FileSegment(ONE, starts[first], ends[last]))  # written, none deleted yet
    position = data.draw(st.integers(0, ends[-1]))
    at = position
    for segment in path_through(data.draw(st.permutations(segments)), position):
        assert segment.start <= at < segment.end
        at = segment.end
    assert at == ends[-1]


def test_names_that_lead_out_of_a_folder_are_ignored():
    name = FileSegment(ONE, 0, 10).name
    foreign = ["../x", "a/../../x", "/x", ".hidden", "a//b", "a\\..\\b"]
    assert files_in([f"records/{file}/{name}" for file in foreign]) == {}
    assert files_in(["records/run.json", f"other/run.json/{name}", f"records/{name}"]) == {}
