"""Ctrl-C in a command, pressed where Python's own exception is lost, late or in the way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tpukit.exit_codes import ExitCode

HEAD = """
import os, signal, sys, threading, time, weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tpukit.runtime.interruption import *
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignored"
end_on_ctrl_c()
place = Path(sys.argv[1])
def ready():
    (place / "ready").touch()
"""


@pytest.fixture
def press(tmp_path):
    """Run a program, press Ctrl-C once it is ready, and return what came of it."""

    def pressed(program, *, times=1, place=tmp_path, number=signal.SIGINT):
        started = subprocess.Popen(
            [sys.executable, "-c", HEAD + program, str(place)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        while not (place / "ready").exists():
            assert started.poll() is None, started.communicate()
            time.sleep(0.01)
        for _ in range(times):
            os.killpg(started.pid, number)
            time.sleep(0.05)
        output, errors = started.communicate(timeout=30)
        return started.returncode, output, errors

    return pressed


SWALLOWED = """
class Held:
    pass

def forget(_):
    ready()
    while True:
        time.sleep(0.01)

held = Held()
kept = weakref.ref(held, forget)
del held  # an exception in this callback is printed and ignored
time.sleep(60)
"""
IN_C = """
import ctypes
ready()
ctypes.CDLL(None).pause()  # as a compile in C++: it does not come back
ctypes.CDLL(None).sleep(60)
"""
POOL = """
def work(number):
    ready()
    time.sleep(60)

with ThreadPoolExecutor(2) as pool:
    list(pool.map(work, range(8)))
"""
CAUGHT = """
ready()
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""


@pytest.mark.parametrize("program", [SWALLOWED, IN_C, POOL, CAUGHT])
def test_one_line_and_one_exit_code_wherever_it_comes(press, program):
    assert press(program) == (ExitCode.INTERRUPTED, "", "interrupted\n")


@pytest.mark.parametrize("program", [SWALLOWED, IN_C, POOL, CAUGHT])
def test_sigterm_ends_a_command_in_the_same_way(press, program):
    assert press(program, number=signal.SIGTERM) == (ExitCode.TERMINATED, "", "terminated\n")


HANDLES = """
signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(7)))
with undone_if_interrupted(lambda: print("undone")):
    ready()
    time.sleep(60)
"""


def test_a_command_with_its_own_handler_of_sigterm_keeps_it(press):
    assert press(HANDLES, number=signal.SIGTERM) == (7, "saved\n", "")


FORKS = """
with undone_if_interrupted(lambda: (place / "undone").touch()):
    child = os.fork()
    if child == 0:
        (place / "begun").touch()
        time.sleep(60)
    while not (place / "begun").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (place / "undone").exists())
ready()
"""


def test_a_forked_child_undoes_nothing_of_its_parent(press):
    assert press(FORKS, times=0)[1] == f"{-signal.SIGTERM} False\n"


def test_what_was_printed_is_not_lost(press):
    assert press("print('verdict'); ready(); time.sleep(60)")[1] == "verdict\n"


CHILD = """
from tpukit.runtime.child import offline_environment, run_child
environment = offline_environment({"PYTHONPATH": %r, "TMPDIR": str(place)})
ready()
request = {"do": "hang with a grandchild", "note": str(place / "note")}
run_child("child_under_test", request, timeout_s=60, environment=environment)
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.6])
def test_no_child_is_left(tmp_path, monkeypatch, press, wait_s):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("PRESSED_IN", str(tmp_path))
    (tmp_path / "temporary").mkdir()
    held = f"threading.Timer({wait_s}, lambda: (place / 'ready').touch()).start()"
    program = CHILD.replace("ready()", held) % str(Path(__file__).parent)
    assert press(program)[0] == ExitCode.INTERRUPTED
    assert not list((tmp_path / "temporary").iterdir())
    left = [one for one in psutil.process_iter() if _variable(one) == str(tmp_path)]
    psutil.wait_procs(left, timeout=5)
    assert not [one for one in left if one.is_running()]


def _variable(process):
    try:
        return process.environ().get("PRESSED_IN")
    except psutil.Error:
        return None


def test_half_made_files_and_folders_are_gone(tmp_path, press):
    program = """
from tpukit.runtime.files import *
with folder_beside(place / "out") as made, whole_file(place / "page.html") as page:
    (made / "part").write_text("half")
    page.write(b"half")
    ready()
    time.sleep(60)
"""
    assert press(program)[0] == ExitCode.INTERRUPTED
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


WELL = """
said = []
signal.signal(signal.SIGINT, lambda *_: said.append("once"))
with ending_well():
    ready()
    while not said:
        time.sleep(0.01)
    %s
print(was_interrupted())
"""


def test_a_command_may_end_well_but_not_for_long(press, tmp_path):
    assert press(WELL % "time.sleep(0.1)") == (0, "True\n", "")
    (tmp_path / "late").mkdir()
    assert press(WELL % "time.sleep(60)", place=tmp_path / "late")[0] == ExitCode.INTERRUPTED


def test_ctrl_c_twice_does_not_wait(press):
    started = time.monotonic()
    program = WELL.replace("ending_well()", "ending_well(3600)") % "time.sleep(60)"
    assert press(program, times=2)[0] == ExitCode.INTERRUPTED
    assert time.monotonic() - started < 30


def test_a_job_in_the_background_stays_deaf(tmp_path):
    program = HEAD.replace("default_int_handler", "SIG_IGN") + "signal.raise_signal(2); print(1)"
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n")
