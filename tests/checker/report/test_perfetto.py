"""Both trace formats, read back by readers that know nothing of the writers."""

import gzip
import json
import struct
from collections import defaultdict

import pytest

from tpukit.checker.report import write_perfetto
from tpukit.errors import TPUValidationError

MEMORY = [[0.0, 100.0], [0.010, 300.0], [0.010, 200.0], [0.090, 100.0]]


def read_varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def decode(data):
    """Any protocol-buffer message: its values by field number."""
    fields, at = defaultdict(list), 0
    while at < len(data):
        key, at = read_varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = read_varint(data, at)
        elif kind == 1:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        else:
            assert kind == 2, f"field {key >> 3} has wire type {kind}"
            size, at = read_varint(data, at)
            value, at = data[at : at + size], at + size
            assert len(value) == size
        fields[key >> 3].append(value)
    return fields


def read_pftrace(data):
    """Tracks by name, each with its slices (name, start, end, depth, arguments) or values."""
    names, tracks, open_slices = {}, defaultdict(list), defaultdict(list)
    last = 0
    for packet in map(decode, decode(data)[1]):
        assert packet[10] == [1]
        if 60 in packet:
            track = decode(packet[60][0])
            names[track[1][0]] = track[2][0].decode() if 2 in track else "process"
            assert track[5] == ([] if names[track[1][0]] == "process" else [1])
            continue
        event, (moment,) = decode(packet[11][0]), packet[8]
        (uuid,), (kind,) = event[11], event[9]
        assert moment >= last, "events are in order of time"
        last = moment
        track = names[uuid]
        if kind == 1:
            notes = [decode(note) for note in event[4]]
            arguments = {note[10][0].decode(): (note[4] or note[5] or note[6])[0] for note in notes}
            open_slices[track].append((event[23][0].decode(), moment, arguments))
        elif kind == 2:
            name, start, arguments = open_slices[track].pop()
            tracks[track].append((name, start, moment, len(open_slices[track]), arguments))
        else:
            tracks[track].append((moment, event[30][0]))
    assert not any(open_slices.values()), "every slice is closed"
    return tracks


def test_the_native_trace_says_what_the_spans_say(step, tmp_path):
    path = write_perfetto(step.spans, tmp_path / "step.pftrace", memory=MEMORY)
    tracks = read_pftrace(path.read_bytes())
    assert set(tracks) == {"Core (MXU and VPU)", "HBM DMA", "HBM DMA #2", "ICI", "live HBM"}
    assert tracks["live HBM"] == [(0, 100), (10_000_000, 300), (90_000_000, 100)]
    found = {
        name: (start, end, arguments)
        for track, slices in tracks.items()
        if track != "live HBM"
        for name, start, end, _, arguments in slices
    }
    assert set(found) == {span.name for span in step.spans} | {"3 more iterations of while.1"}
    for span in step.spans:
        start, end, arguments = found[span.name]
        assert start == round(span.start_s * 1e9)
        assert end - start == pytest.approx(span.duration_s * 1e9, abs=1)
        assert arguments["op_name"].decode() == span.op_name
        assert arguments["cause"].decode() == span.cause
        assert arguments["origin"] == b"model"
        assert (arguments["flops"], arguments["bytes"]) == (span.flops, span.bytes)
        assert arguments["times"] == span.times
    depths = {name: depth for name, _, _, depth, _ in tracks["Core (MXU and VPU)"]}
    assert depths == {
        "embed": 0,
        "while.1": 0,
        "adam": 0,
        "fusion.2": 1,
        "all-gather-done.3": 1,
        "3 more iterations of while.1": 1,
    }


def test_slices_of_a_json_row_nest_and_say_what_the_spans_say(step, tmp_path):
    path = write_perfetto(step.spans, tmp_path / "step.json", memory=MEMORY, name="tiny on v6e-8")
    events = json.loads(path.read_text())["traceEvents"]
    about = {(one["name"], one["tid"]): one["args"] for one in events if one["ph"] == "M"}
    assert about["process_name", 0] == {"name": "tiny on v6e-8"}
    slices = [one for one in events if one["ph"] == "X"]
    rows = defaultdict(list)
    for one in slices:
        rows[one["tid"]].append((round(one["ts"] * 1e3), round((one["ts"] + one["dur"]) * 1e3)))
    for row in rows.values():
        for start, end in row:
            for other_start, other_end in row:
                crossing = start < other_start < end < other_end
                assert not crossing
    by_name = {one["name"]: one for one in slices}
    fusion = by_name["fusion.2"]
    assert (fusion["ts"], fusion["dur"], fusion["cat"]) == (10_000.0, 15_000.0, "matrix")
    assert fusion["args"]["flops"] == 8e12
    assert fusion["args"]["times"] == 4
    copies = {by_name[name]["tid"] for name in ("copy-start.4", "copy-start.5")}
    assert len(copies) == 2
    counters = [(one["ts"], one["args"]["bytes"]) for one in events if one["ph"] == "C"]
    assert counters == [(0.0, 100), (10_000.0, 300), (90_000.0, 100)]


@pytest.mark.parametrize("ending", ["json", "pftrace"])
def test_a_packed_trace_holds_the_same_bytes_each_time(step, tmp_path, ending):
    plain = write_perfetto(step.spans, tmp_path / f"a.{ending}").read_bytes()
    packed = write_perfetto(step.spans, tmp_path / f"a.{ending}.gz").read_bytes()
    assert gzip.decompress(packed) == plain
    assert write_perfetto(step.spans, tmp_path / f"b.{ending}.gz").read_bytes() == packed


def test_a_name_that_is_no_trace_is_refused(step, tmp_path):
    with pytest.raises(
        TPUValidationError, match=r"step\.pftrac is no name.*Did you mean '.pftrace'"
    ):
        write_perfetto(step.spans, tmp_path / "step.pftrac")


def test_without_spans_there_is_no_trace(tmp_path):
    with pytest.raises(TPUValidationError, match="stopped at the verdict on memory"):
        write_perfetto((), tmp_path / "step.json")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(step, tmp_path):
    with pytest.raises(TPUValidationError, match=r"No such file or directory.*another place"):
        write_perfetto(step.spans, tmp_path / "missing" / "step.json")
