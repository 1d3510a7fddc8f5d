"""When the files of a compile may be read: libtpu writes them in order, or several at once."""

import os
import time

import pytest

from tpukit.compiler.dump import PROGRAM, Dump

REPORT = "Memory Space: default (0)\nTotal bytes: 1000 (1000B)\n"
WRITTEN = {
    "after_optimizations.txt": "HloModule jit_call\n\nENTRY main {\n}\n\n",
    "after_optimizations-buffer-assignment.txt": "BufferAssignment:\n",
    "after_optimizations-live-range.txt": "HloLiveRange\n",
    "after_optimizations-memory-usage-report.txt": REPORT,
}


@pytest.fixture
def write(tmp_path):
    def write(ages_s, **changed):
        for (name, text), age_s in zip(WRITTEN.items(), ages_s, strict=True):
            path = tmp_path / f"module_1.{PROGRAM}.1.{name}"
            path.write_text(changed.get("schedule", text) if "optimizations.txt" in name else text)
            os.utime(path, (time.time() - age_s,) * 2)
        return Dump(tmp_path)

    return write


def test_files_that_were_written_before_the_report_are_whole(write):
    assert write([0.4, 0.3, 0.2, 0.1]).leaves_room(2000)
    assert not write([0.4, 0.3, 0.2, 0.1]).leaves_room(900)


def test_one_that_is_written_after_the_report_is_waited_for(write):
    assert not write([-60, 0.3, 0.2, 0.1]).leaves_room(2000)
    assert not write([9, 9, -60, 9]).leaves_room(2000)
    assert write([9, 8, 8, 9]).leaves_room(2000)


def test_half_a_program_is_never_read(write):
    half = "HloModule jit_call\n\nENTRY main {\n  a = f32[]"
    assert not write([9, 9, 9, 8], schedule=half).leaves_room(2000)


def test_all_files_have_to_be_there(write, tmp_path):
    dump = write([9, 9, 9, 8])
    next(tmp_path.glob("*live-range.txt")).unlink()
    assert not dump.leaves_room(2000)
