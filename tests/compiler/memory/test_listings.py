"""Readers of the compiler's listings, against small texts and against brute force."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.compiler.memory.assignment import (
    find_tenancies,
    heap_use,
    parse_assignment,
    parse_live_ranges,
    total_bytes,
)
from tpukit.compiler.memory.sources import parse_sources
from tpukit.errors import XLACompilationError

ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 reduce_sum.220 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 8192, parameter 1, shape |f32[256,8]| at ShapeIndex {}, maybe-live-out:
 value: <2199 param.5 @0> (size=8192,offset=0): f32[256,8]{0,1:T(8,128)}
 value: <2362 copy-start.13{0} @0> (size=8192,offset=0): f32[256,8]{0,1:T(8,128)}
allocation 2: size 192, output shape is |(s32[], f32[8])|, maybe-live-out:
 value: <64 tuple.842{} @0> (size=192,offset=0): (s32[]{:T(128)}, f32[8]{0:T(128)})
allocation 3: size 65536, preallocated-temp:
 value: <7 wide.param.3{6} (phi) @0> (size=1024,offset=4096): f32[2,64]{1,0:T(8,128)}
allocation 4: size 4096, color 5, preallocated-temp:
 value: <8 copy.1 @5> (size=4096,offset=0): bf16[8,128]{1,0:T(8,128)(2,1)S(5)}
"""


def test_allocations_and_their_values():
    thread, argument, table, heap, host = parse_assignment(ASSIGNMENT)
    assert thread.parameter is None
    assert not thread.is_live_out
    assert argument.parameter == 1
    assert argument.is_live_out
    assert argument.values[1].key == "copy-start.13{0}"
    assert str(argument.values[0].shape) == "f32[256,8]"
    assert argument.values[0].layout_text == "{0,1:T(8,128)}"
    assert table.is_output_table
    assert table.values[0].shape is None
    assert heap.is_temporary
    assert heap.values[0].is_phi
    assert host.color == 5
    assert total_bytes((thread, argument, table, heap, host)) == 512 + 8192 + 192 + 65536
    assert total_bytes((host,), 5) == 4096


def test_a_foreign_text_is_refused():
    with pytest.raises(XLACompilationError, match="no allocation"):
        parse_assignment("nothing of the kind")


@given(st.text())
def test_any_text_is_read_or_refused(text):
    with suppress(XLACompilationError):
        parse_assignment(text)
    parse_live_ranges(text)
    parse_sources(text)


def test_live_ranges():
    schedule = parse_live_ranges(
        "HloLiveRange (max 2):\n  InstructionSequence:\n    0:a\n    1:b.1\n    2:c\n"
        "  BufferLiveRange:\n    a{}:0-2\n    b.1{0,1}:1-2\n  Live ranges at 1 (peak):\n    a: 4\n"
    )
    assert schedule.instructions == ("a", "b.1", "c")
    assert schedule.ranges == {"a{}": (0, 2), "b.1{0,1}": (1, 2)}
    assert schedule.position["c"] == 2


# Values at a few places of a heap that do not overlap, as the compiler lays them out.
_VALUES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12
)


@given(_VALUES)
def test_heap_use_is_what_brute_force_counts(values):
    sizes = {0: 100, 1: 30, 2: 7, 3: 1}
    lines = ["allocation 0: size 1000, preallocated-temp:"]
    ranges = []
    alive = [set() for _ in range(12)]
    for number, (place, one, other) in enumerate(values):
        start, end = sorted((one, other))
        at = f"(size={sizes[place]},offset={place * 100})"
        lines.append(f" value: <{number} v.{number} @0> {at}: f32[1]{{0}}")
        ranges.append(f"    v.{number}{{}}:{start}-{end}")
        for moment in range(start, end + 1):
            alive[moment].add(place)
    (heap,) = parse_assignment("\n".join(lines))
    order = "\n".join(f"    {place}:i.{place}" for place in range(10))
    schedule = parse_live_ranges(
        "  InstructionSequence:\n" + order + "\n  BufferLiveRange:\n" + "\n".join(ranges)
    )
    tenancies = find_tenancies(heap, schedule)
    use = heap_use(tenancies, len(schedule.instructions))
    expected = [sum(sizes[place] for place in places) for places in alive]
    assert use == expected[: len(use)]
    assert sum(len(one.values) for one in tenancies) == len(values)


@pytest.mark.parametrize("file", ["mine/model.py", "tpukit/model.py", "compiler/worker.py"])
def test_frames_lead_to_the_users_line(monkeypatch, tmp_path, file):
    monkeypatch.chdir(tmp_path)
    table = parse_sources(
        "HloModule jit_call\n\nFileNames\n"
        '1 "/x/tpukit/compiler/worker.py"\n'
        f'2 "{tmp_path}/{file}"\n'
        '3 "/x/lib/python3.11/site-packages/optax/adam.py"\n\n'
        'FunctionNames\n1 "f"\n\nFileLocations\n'
        "1 {file_name_id=1 function_name_id=1 line=5 end_line=5 column=1 end_column=1}\n"
        "2 {file_name_id=2 function_name_id=1 line=42 end_line=42 column=1 end_column=1}\n"
        "3 {file_name_id=3 function_name_id=1 line=7 end_line=7 column=1 end_column=1}\n\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n"
        "2 {file_location_id=2 parent_frame_id=2}\n3 {file_location_id=3 parent_frame_id=3}\n"
        "4 {file_location_id=3 parent_frame_id=2}\n\n"
    )
    assert table.line_of(2) == f"{file}:42"
    assert table.line_of(3) == f"{file}:42"  # optax, called by the user
    assert table.line_of(4) == "optax/adam.py:7"  # nobody of ours called it
    assert table.line_of(1) is None
    assert table.line_of(None) is None
