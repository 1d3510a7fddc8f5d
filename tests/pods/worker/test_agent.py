"""The agent by itself: a real process that gets orders on its standard input."""

import ast
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tpukit.exit_codes import ExitCode
from tpukit.pods.worker import agent
from tpukit.pods.worker.order import (
    AGENT,
    Order,
    OrderFile,
    bootstrap,
    read_wanted,
    signal_line,
)


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """A home of its own, where files are kept."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def begin(order, *, command=None):
    _, _, text = bootstrap()
    process = subprocess.Popen(
        command or [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    process.stdin.write(order.to_line())
    process.stdin.flush()
    if not order.shares_files:
        wanted = read_wanted(process.stderr.readline().decode())
        for digest in wanted:
            process.stdin.write(order.files[digest].path.read_bytes())
        process.stdin.flush()
        process.wanted = wanted
    return process


def end(process):
    """The exit code and what was printed, with the input left open to the end."""
    output, errors = process.stdout.read().decode(), process.stderr.read().decode()
    process.stdin.close()
    code = process.wait()
    process.stdout.close()
    process.stderr.close()
    return code, output, errors


def python(text, **details):
    return Order(argv=(sys.executable, "-c", text), **details)


def archive(path, **files):
    with tarfile.open(path, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name.replace("__", "/"))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return OrderFile.of(path)


def is_gone(pid):
    for _ in range(2000):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_the_agent_imports_nothing_but_the_standard_library():
    nodes = ast.walk(ast.parse(AGENT.read_text()))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [
        node.module
        for node in ast.walk(ast.parse(AGENT.read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names
    codes = (agent.DIRTY_HOST, agent.SETUP_FAILED, agent.NOT_STARTED)
    assert codes == (ExitCode.DIRTY_HOST, ExitCode.SETUP_FAILED, ExitCode.NOT_STARTED)


def test_a_command_runs_in_its_folder_with_its_environment(tmp_path):
    said = "import os; print(os.getcwd(), os.environ['WORD'], open('data/text').read())"
    bundle = archive(tmp_path / "bundle.tar", data__text=b"shipped")
    order = python(said, environment={"WORD": "secret"}, folder=str(tmp_path), bundle=bundle)
    process = begin(order)
    assert "secret" not in " ".join(psutil.Process(process.pid).cmdline())
    assert end(process) == (0, f"{tmp_path} secret shipped\n", "")


def test_a_file_that_a_host_has_is_not_sent_again(home, tmp_path):
    bundle = archive(tmp_path / "bundle.tar", text=b"first")
    order = python("print(open('text').read())", folder=str(tmp_path / "a"), bundle=bundle)
    first = begin(order)
    assert end(first)[1] == "first\n"
    again = begin(replace(order, folder=str(tmp_path / "b")))
    assert end(again)[1] == "first\n"
    assert (first.wanted, again.wanted) == ([bundle.digest], [])
    kept = home / ".cache" / "tpukit" / "files"
    assert [path.name for path in kept.iterdir()] == [bundle.digest]
    os.utime(kept / bundle.digest, (0, 0))  # unused since 1970
    other = archive(tmp_path / "other.tar", text=b"second")
    assert end(begin(replace(order, bundle=other)))[1] == "second\n"
    assert [path.name for path in kept.iterdir()] == [other.digest]


def test_a_file_that_changed_on_its_way_is_refused(home, tmp_path):
    bundle = archive(tmp_path / "bundle.tar", text=b"first")
    archive(tmp_path / "bundle.tar", text=b"other")
    code, _, errors = end(begin(python("", folder=str(tmp_path), bundle=bundle)))
    assert code == ExitCode.SETUP_FAILED
    assert "arrived with digest" in errors
    assert not list((home / ".cache" / "tpukit" / "files").iterdir())


def test_a_host_that_shares_files_gets_none(home, tmp_path):
    bundle = archive(tmp_path / "bundle.tar", text=b"first")
    said = "print(open('text').read())"
    order = python(said, folder=str(tmp_path / "in"), bundle=bundle, shares_files=True)
    assert end(begin(order)) == (0, "first\n", "")
    assert not list(home.iterdir())


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.abort()", 134),
    ],
)
def test_the_exit_code_is_the_command_s(text, code, tmp_path):
    assert end(begin(python(text, folder=str(tmp_path))))[0] == code


def test_what_cannot_run_is_refused_with_a_reason(tmp_path):
    missing = Order(argv=("no-such-program",), folder=str(tmp_path))
    code, _, errors = end(begin(missing))
    assert (code, errors) == (
        ExitCode.NOT_STARTED,
        "worker: no-such-program cannot be started: No such file or directory\n",
    )
    escaping = archive(tmp_path / "bundle.tar", **{"..__outside": b""})
    code, _, errors = end(begin(python("", folder=str(tmp_path / "in"), bundle=escaping)))
    assert code == ExitCode.SETUP_FAILED
    assert "outside" in errors
    assert not (tmp_path / "outside").exists()


def test_setup_runs_once_for_a_folder_and_its_failure_ends_the_order(tmp_path):
    count = (sys.executable, "-c", "open('count', 'a').write('x')")
    for _ in range(2):
        assert end(begin(python("", folder=str(tmp_path), setup=(count,))))[0] == 0
    assert (tmp_path / "count").read_text() == "x"
    failing = (sys.executable, "-c", "raise SystemExit(5)")
    code, _, errors = end(begin(python("", folder=str(tmp_path), setup=(failing,))))
    assert code == ExitCode.SETUP_FAILED
    assert "exit code 5" in errors


def test_signals_reach_the_command_through_either_way(tmp_path):
    text = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
print("ready", flush=True)
signal.pause()
"""
    for way in ("line", "signal"):
        process = begin(python(text, folder=str(tmp_path)))
        assert process.stdout.readline() == b"ready\n"
        if way == "line":
            process.stdin.write(signal_line(signal.SIGTERM))
            process.stdin.flush()
        else:
            process.send_signal(signal.SIGTERM)
        assert end(process)[0] == 9


FAMILY = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
{then}
"""


@pytest.mark.parametrize("how", ["input ends", "while stopped", "agent killed"])
def test_nothing_outlives_its_order(how, tmp_path):
    process = begin(python(FAMILY.format(then="child.wait()"), folder=str(tmp_path)))
    pids = [int(pid) for pid in process.stdout.readline().split()]
    if how == "while stopped":
        os.kill(pids[0], signal.SIGSTOP)
    if how == "agent killed":
        process.kill()
        os.kill(pids.pop(), signal.SIGKILL)  # only the command itself is the kernel's to end
    process.stdin.close()
    assert all(map(is_gone, pids))
    process.wait()
    process.stdout.close()
    process.stderr.close()


def test_what_a_command_leaves_behind_is_ended_with_it(tmp_path):
    process = begin(python(FAMILY.format(then=""), folder=str(tmp_path)))
    _, child = map(int, process.stdout.readline().split())
    assert end(process)[0] == 0
    assert is_gone(child)


def test_a_lock_is_removed_only_where_nobody_holds_it(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    with subprocess.Popen(
        [sys.executable, "-c", f"f = open({str(lock)!r}); print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        holder.stdout.readline()
        agent.remove_stale_lock(str(lock))
        assert lock.exists()
        with pytest.raises(agent.OrderRefused, match=f"in use by process {holder.pid}") as refused:
            agent.refuse_dirty_host((str(tmp_path / "lo*"),))
        assert refused.value.code == ExitCode.DIRTY_HOST
        holder.stdin.close()
    agent.remove_stale_lock(str(lock))
    assert not lock.exists()
    agent.refuse_dirty_host((str(tmp_path / "*"),))


SHOWS = """
import os, sys, json
jax = sys.modules.get("jax")
said = [sys.argv[1:], os.getcwd(), os.environ["WORD"], __name__, "json" in sys.modules]
print(json.dumps(said + [jax and jax.config.jax_enable_x64, jax and jax.config.jax_platforms]))
"""


@pytest.mark.parametrize("modules", [["json"], ["jax"]])
def test_a_spare_becomes_the_command_with_its_environment(modules, tmp_path):
    (tmp_path / "shows.py").write_text(SHOWS)
    order = Order(
        argv=(sys.executable, "-m", "shows", "a b"),
        folder=str(tmp_path),
        environment={"WORD": "hello", "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
    )
    process = begin(order, command=[sys.executable, "-m", "tpukit.pods.worker", *modules])
    code, output, errors = end(process)
    assert code == 0, errors
    *said, x64, platforms = json.loads(output)
    assert said == [["a b"], str(tmp_path), "hello", "__main__", True]
    assert (x64, platforms) == ((True, "cpu") if modules == ["jax"] else (None, None))


def test_a_spare_that_is_not_needed_ends_with_its_agent(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "tpukit.pods.worker", "json"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr.readline() == b"spare ready\n"
    (spare,) = psutil.Process(process.pid).children()
    process.stdin.close()
    assert is_gone(spare.pid)
    process.wait()
    process.stderr.close()


def test_the_agent_s_folder_may_be_below_home(home):
    assert end(begin(python("open('here', 'w')", folder="~/jobs/one")))[0] == 0
    assert Path(home / "jobs" / "one" / "here").is_file()
