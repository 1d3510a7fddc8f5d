"""Lines read while they are written, against what the file holds in the end."""

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.observe.runs import growing_file
from tpukit.observe.runs.growing_file import GrowingFile


def follow(file, held):
    """Apply what is new to `held`, as every user of pieces does."""
    for piece in file.poll():
        del held[piece.keep :]
        held += piece.lines
    return held


def test_a_line_is_taken_when_its_end_is_there(tmp_path):
    path = tmp_path / "lines"
    file, held = GrowingFile(path), []
    assert follow(file, held) == []
    with path.open("wb", buffering=0) as out:
        out.write(b"one\ntw")
        assert follow(file, held) == [b"one"]
        out.write(b"o\n")
        assert follow(file, held) == [b"one", b"two"]


def test_a_poll_of_an_unchanged_file_reads_nothing(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n")
    file = GrowingFile(path)
    follow(file, [])
    monkeypatch.setattr(growing_file, "_holds", None)  # not even looked at
    assert list(file.poll()) == []


def test_a_file_rewritten_at_the_same_size_is_read_again(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n")
    file, held = GrowingFile(path), []
    follow(file, held)
    with path.open("r+b") as out:
        out.write(b"six\nten\n")
    os.utime(path, ns=(1, 1))  # whatever the clock of the disk counts in
    assert follow(file, held) == [b"six", b"ten"]


def test_a_file_that_is_gone_is_empty_until_it_is_back(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n")
    file, held = GrowingFile(path), []
    follow(file, held)
    path.unlink()
    assert follow(file, held) == []
    path.write_bytes(b"three\n")
    assert follow(file, held) == [b"three"]


def test_a_disk_that_refuses_leaves_what_was_read(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\n")
    file, held = GrowingFile(path), []
    follow(file, held)
    path.unlink()
    path.mkdir()  # opening it gives EISDIR, for root as well
    assert follow(file, held) == [b"one"]
    assert "cannot be read" in file.error
    path.rmdir()
    path.write_bytes(b"one\ntwo\n")
    assert follow(file, held) == [b"one", b"two"]
    assert file.error == ""


changes = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.binary(max_size=6), max_size=9)),
        st.tuples(st.just("half"), st.binary(min_size=1, max_size=6)),
        st.tuples(st.just("roll back"), st.integers(0, 40)),
        st.tuples(st.just("replace"), st.lists(st.binary(max_size=6), max_size=9)),
    ),
    max_size=12,
)


@pytest.mark.parametrize("chunk", [7, 64])
@settings(max_examples=60, deadline=None)
@given(changes=changes)
def test_what_is_held_is_what_the_file_holds(tmp_path_factory, chunk, changes):
    path = tmp_path_factory.mktemp("lines") / "lines"
    file, held = GrowingFile(path), []
    content, number = b"", 0
    before = growing_file.CHUNK
    growing_file.CHUNK = chunk
    try:
        for kind, value in changes:
            if kind == "append":
                for word in value:  # numbered: no two lines of a real file are alike
                    number += 1
                    content += word.replace(b"\n", b"") + b" %d\n" % number
            elif kind == "half":
                content += value.replace(b"\n", b"") or b"x"
            elif kind == "roll back":
                content = b"".join(line + b"\n" for line in content.split(b"\n")[:-1][:value])
            else:
                number += 1
                content = b"".join(word.replace(b"\n", b"") + b"!%d\n" % number for word in value)
            if kind in ("roll back", "replace"):  # as MetricsFile does: a new file in its place
                (path.parent / "new").write_bytes(content)
                os.replace(path.parent / "new", path)
            else:
                path.write_bytes(content)
            assert follow(file, held) == content.split(b"\n")[:-1]
    finally:
        growing_file.CHUNK = before


def test_a_file_that_is_written_by_another_thread_is_read_whole(tmp_path):
    path = tmp_path / "lines"
    wanted = [b'{"step": %d}' % number for number in range(20_000)]

    def write():
        with path.open("wb", buffering=0) as out:
            text = b"".join(line + b"\n" for line in wanted)
            for at in range(0, len(text), 977):  # in the middle of lines
                out.write(text[at : at + 977])

    thread = threading.Thread(target=write)
    thread.start()
    file, held = GrowingFile(path), []
    while thread.is_alive():
        follow(file, held)
    assert follow(file, held) == wanted
