"""Tests leave no process, no file in the home folder and no changed device file behind."""

import os
import shutil
import tempfile
from pathlib import Path

import psutil
import pytest

MARK = "STARTED_BY_TESTS_OF"
DEVICES = [Path("/dev", name) for name in ("null", "zero", "full", "random", "urandom", "tty")]
DEVICES += [Path("/dev", name) for name in ("stdin", "stdout", "stderr", "fd", "ptmx", "shm")]
PATIENCE_S = 10  # a process that was told to end may take a moment
# Python's own helpers of multiprocessing, which end with the process they were started by.
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# What is read below a home folder by programs that tests start, with the variable that moves it.
READ = {
    "PYENV_ROOT": ".pyenv",
    "PIP_CONFIG_FILE": ".config/pip/pip.conf",
    "GIT_CONFIG_GLOBAL": ".gitconfig",
    "RUSTUP_HOME": ".rustup",  # pip asks rustc for its version, which makes this folder
}
_WRITTEN = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")


def pytest_configure():
    """Give this process and its children a home folder of their own, which has to stay empty."""
    before = Path.home()
    for variable, path in READ.items():
        if variable not in os.environ and (before / path).exists():
            os.environ[variable] = str(before / path)
    for variable in _WRITTEN:
        os.environ.pop(variable, None)
    os.environ["HOME"] = tempfile.mkdtemp(prefix="tpukit-tests-home-")
    os.environ[MARK] = str(os.getpid())


def pytest_unconfigure():
    shutil.rmtree(os.environ["HOME"], ignore_errors=True)


def state_of(device):
    """Return what changes when a file is written over a device, None if there is none."""
    try:
        found = device.lstat()
    except OSError:
        return None
    return found.st_mode, found.st_rdev, found.st_ino


@pytest.fixture(autouse=True)
def nothing_is_left():
    home, devices = Path(os.environ["HOME"]), {device: state_of(device) for device in DEVICES}
    yield
    changed = [str(device) for device, before in devices.items() if state_of(device) != before]
    assert not changed, f"this test changed {', '.join(changed)}: make it a device again"
    if files := os.listdir(home):
        for path in map(home.joinpath, files):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        pytest.fail(f"this test left {', '.join(files)} in the home folder")


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left():
    yield
    _, left = psutil.wait_procs(started_by_tests(), timeout=PATIENCE_S)
    described = [describe(process) for process in left]
    for process in left:
        process.kill()
    assert not left, "processes outlived their tests:\n" + "\n".join(described)


def started_by_tests():
    """Return all living processes that were started from here, also those that were let go."""
    here = str(os.getpid())
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) != here or process.pid == os.getpid():
                continue
            if process.status() != psutil.STATUS_ZOMBIE and not is_helper(process):
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_helper(process):
    return any(name in " ".join(process.cmdline()) for name in HELPERS)


def describe(process):
    try:
        test = process.environ().get("PYTEST_CURRENT_TEST", "before any test")
        return f"{test}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"process {process.pid}, which ended meanwhile"
