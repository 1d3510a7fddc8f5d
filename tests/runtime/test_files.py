"""Files and folders are whole or not there, whoever is killed, and no temporary one stays."""

import ast
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import tpukit
from tpukit.errors import TPUValidationError
from tpukit.runtime.files import (
    finish_folder,
    folder_beside,
    whole_file,
    write_bytes,
    write_json,
    write_output,
    write_text,
)

MAKERS = ("os.replace", "mkstemp", "NamedTemporaryFile", "mkdtemp", "TemporaryDirectory")
SOURCE = Path(tpukit.__file__).parent


def test_what_is_written_is_read(tmp_path):
    write_bytes(tmp_path / "b", b"\0\xff")
    write_text(tmp_path / "t", "ä\n", durable=True)
    write_json(tmp_path / "j", {"ä": [1, None, "\ud800"]})
    assert (tmp_path / "b").read_bytes() == b"\0\xff"
    assert (tmp_path / "t").read_bytes() == "ä\n".encode()
    assert json.loads((tmp_path / "j").read_text()) == {"ä": [1, None, "\ud800"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "j", "t"]


def write_half(path, error):
    with whole_file(path) as file:
        file.write(b"half of the n")
        file.flush()
        raise error


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(error):
        write_half(path, error)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_old_or_new_while_it_is_written(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_it_has_the_rights_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "ours", "")
        (tmp_path / "usual").write_text("")
    finally:
        os.umask(before)
    ours, usual = ((tmp_path / name).stat().st_mode for name in ("ours", "usual"))
    assert stat.S_IMODE(ours) == stat.S_IMODE(usual) == 0o640


def test_the_longest_name_works(tmp_path):
    write_text(tmp_path / ("x" * 255), "")
    with folder_beside(tmp_path / ("y" * 255)) as made:
        finish_folder(made, tmp_path / ("y" * 255))
    assert {len(path.name) for path in tmp_path.iterdir()} == {255}


def start(program, *arguments):
    """Another process, with Path and what is tested at hand."""
    head = "import os, sys; from pathlib import Path; from tpukit.runtime.files import *\n"
    return subprocess.Popen([sys.executable, "-c", head + program, *map(str, arguments)])


def test_writers_at_the_same_time_never_mix(tmp_path):
    path = tmp_path / "file"
    write = "for _ in range(200): write_text(Path(sys.argv[1]), sys.argv[2] * 10_000)"
    writers = [start(write, path, letter) for letter in "ab"]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            assert path.read_text() in ("a" * 10_000, "b" * 10_000)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert list(tmp_path.iterdir()) == [path]


def test_a_user_is_told_what_is_wrong_with_the_place(tmp_path):
    with pytest.raises(TPUValidationError, match=r"no/page\.html cannot be written \(No such file"):
        write_output(tmp_path / "no" / "page.html", "x")
    with pytest.raises(TPUValidationError, match="cannot be written"):
        write_output(tmp_path, b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_appears_whole_and_replaces_another(tmp_path):
    target = tmp_path / "deep" / "out[1]"
    for content in ("old", "new"):
        with folder_beside(target) as made:
            (made / "file").write_text(content)
            finish_folder(made, target)
        assert (target / "file").read_text() == content
    assert list(target.parent.iterdir()) == [target]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "file").write_text("old")
    with pytest.raises(FileNotFoundError):
        finish_folder(tmp_path / "never made", target)
    assert (target / "file").read_text() == "old"


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    start("with folder_beside(Path(sys.argv[1])): os._exit(1)", tmp_path / "out").wait()
    (left,) = tmp_path.iterdir()
    with folder_beside(tmp_path / "out") as mine, folder_beside(tmp_path / "out") as other:
        assert not left.exists()
        assert mine.is_dir()  # this process is alive, so a second one leaves it alone
        assert other != mine
    assert not list(tmp_path.iterdir())


def test_nobody_else_replaces_files():
    found = []
    # These run in users' processes and on hosts without tpukit, so they import nothing of ours.
    alone = [SOURCE / "capturing" / "shim"]
    alone += [SOURCE / "pods" / "worker" / name for name in ("agent.py", "environment.py")]
    for path in SOURCE.rglob("*.py"):
        if any(path.is_relative_to(place) for place in alone):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name.endswith(MAKERS):
                    found.append(path.relative_to(SOURCE).as_posix())
    assert set(found) == {"runtime/files.py"}


def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_bytes(pipe, b"a page")
    reader.join(timeout=10)
    assert read == [b"a page"]
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
