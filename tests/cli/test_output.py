"""What commands write: whole on a pipe, and a launched run's steps once."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Group
from rich.table import Table
from typer.testing import CliRunner

from tpukit.cli import output
from tpukit.cli.app import app
from tpukit.cli.launch import PlainLaunchView
from tpukit.cli.output import Announcer, print_whole
from tpukit.job.sections import LaunchSettings
from tpukit.pods import PodConfig, Store
from tpukit.pods.launching.run_log import RunLogEntry
from tpukit.pods.providers.protocol import Line
from tpukit.pods.store import ProviderRecord

LONG = "a-name-that-somebody-has-to-copy-" * 9


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("columns", ["20", "80", ""])
def test_nothing_is_cut_or_folded_on_a_pipe(capsys, monkeypatch, expand, columns):
    monkeypatch.setenv("COLUMNS", columns)
    table = Table("name", "other", expand=expand)
    table.add_row(LONG, LONG)
    print_whole(Group(table, f"a sentence with {LONG}"))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.count(LONG) == 2 for line in lines)
    assert f"a sentence with {LONG}" in lines
    assert not any("…" in line for line in lines)


def test_commands_print_through_one_function():
    # `top` alone draws on a terminal of its own.
    for file in Path(output.__file__).parent.glob("*.py"):
        if file.name not in ("output.py", "top.py"):
            assert "Console()" not in file.read_text(), file.name


def test_pods_are_listed_with_their_whole_names(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "40")
    store, name = Store(), "a-run-with-a-name-of-34-characters"
    config = PodConfig(tpu_type="2xv6e-256", zones=("northamerica-northeast1-b",))
    record = ProviderRecord.of("gcp", LaunchSettings(project="p"))
    store.wanted.want(name, config, record)
    store.wanted.ask_in(name, zone="northamerica-northeast1-b", attempt=1)
    store.close()
    found = CliRunner().invoke(app, ["pods", "ls"])
    (line,) = (line for line in found.stdout.splitlines() if line.startswith(name))
    assert line.split()[:2] == [name, f"{name}-a1"]
    assert "northamerica-northeast1-b" in line


def test_a_real_pipe_gets_whole_lines():
    code = (
        "from rich.table import Table; from tpukit.cli.output import print_whole\n"
        f"table = Table('name'); table.add_row({LONG!r}); print_whole(table)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert LONG in ran.stdout


def shown(capsys, *entries):
    view = PlainLaunchView(200, to_stderr=False)
    for entry in entries:
        view.show(entry)
    return capsys.readouterr().out.splitlines()


def step(number, at):
    return RunLogEntry("step", host="x-0", at=at, data={"step": number, "loss": 1.0})


def test_steps_that_a_job_prints_are_not_shown_twice(capsys):
    own = "step 1/200  loss 1.0000  0.1 s/step"
    lines = shown(
        capsys,
        step(1, 0.0),
        RunLogEntry("line", own, "x-0", at=0.1),
        step(90, 9.0),
        step(200, 20.0),
    )
    assert lines == [f"[x-0] {own}"]


def test_steps_of_a_job_that_prints_none_are_shown_now_and_then(capsys):
    lines = shown(capsys, step(1, 0.0), step(2, 1.0), step(90, 9.0), step(91, 9.5), step(200, 20.0))
    assert lines == ["step 90/200  loss 1.0000", "step 200/200  loss 1.0000"]


def test_lines_that_tell_nothing_of_the_job_are_left_out():
    noise = "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks: 3"
    assert RunLogEntry.of(Line("x-0", noise)) is None
    assert RunLogEntry.of(Line("x-0", "[Gloo] failed")).text == "[Gloo] failed"


def test_what_was_done_before_is_not_repeated_once_a_run_is_shown(capsys, monkeypatch):
    monkeypatch.setattr(Announcer, "SILENCE_S", 0.05)
    say = Announcer()
    say("ships 1 file")
    Announcer.hush()
    time.sleep(0.3)
    assert capsys.readouterr().err.count("ships 1 file") == 1
