"""Whatever is typed, a command answers in one clear sentence: no traceback, no lost hour."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import odd_input
import pytest
from command_line import every_command
from odd_input import RIGHT, odd_command, replaced
from typer.testing import CliRunner

from tpukit.cli import main, values
from tpukit.cli.app import app
from tpukit.compiler import aot
from tpukit.errors import TPUError, TPUValidationError
from tpukit.observe.dashboard import serving
from tpukit.runtime.child import ChildError

COMMANDS = every_command()
OUTPUTS = [
    pytest.param(command, parameter, id=f"{name} {parameter.name}")
    for name, command in COMMANDS.items()
    for parameter in command.parameters
    if parameter.info.callback in (values.output_file, values.output_folder)
]
# Files that are read: who reads them says what they should hold.
READ = {
    *("files", "nodes", "after", "before", "file", "predicted", "rates", "recording", "report"),
    *("folders", "replay", "run", "timings", "baseline"),
}
# The planner gives its own numbers their ranges, in Python too.
RANGES_ELSEWHERE = {"plan"}
NUMBERS = [
    pytest.param(command, parameter, id=f"{name} {parameter.name}")
    for name, command in COMMANDS.items()
    for parameter in command.parameters
    if parameter.kind in (int, float) and name not in RANGES_ELSEWHERE
]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd") / "files"
    folder.mkdir()
    odd_input.fill(folder)
    return folder


@pytest.fixture
def here(filled, tmp_path, monkeypatch):
    """A folder of odd files, made anew: a command may write over what another reads."""

    def made():
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(tmp_path / "here", ignore_errors=True)
        shutil.copytree(filled, tmp_path / "here", symlinks=True)
        monkeypatch.chdir(tmp_path / "here")

    made()
    return made


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """Options are read, models built and lowered; what would take minutes is refused."""

    def refuse(*_, **__):
        raise ChildError("nothing is compiled here", kind="timeout")

    monkeypatch.setattr(aot, "watch_child", refuse)


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    """The dashboard gets ready, takes its port, and would serve until Ctrl-C."""
    monkeypatch.setattr(serving, "run_server", lambda app, listener: None)
    monkeypatch.setattr(serving.webbrowser, "open", lambda address: True)


def answer(typed):
    """Run a command here; fail on anything but a result or a sentence."""
    # What other tests have compiled stays, and the pods of others too.
    own = {"TPUKIT_CACHE_DIR": "cache", "TPUKIT_STATE_DIR": "state"}
    cache = own if typed[0] in ("cache", "pods", "launch") else {}
    found = CliRunner().invoke(app, typed, env=cache)
    error = found.exception
    if error is not None and not isinstance(error, SystemExit | TPUError):
        raise AssertionError(f"tpukit {' '.join(map(repr, typed))}") from error
    if isinstance(error, TPUError):
        assert len(str(error)) > 15, (typed, error)
    return found


def test_every_command_has_its_right_words():
    assert set(RIGHT) == set(COMMANDS)


def test_every_number_has_a_range_and_every_output_is_tried():
    for name, command in COMMANDS.items():
        for parameter in command.parameters:
            about = f"{name} {parameter.name}"
            if parameter.kind in (int, float) and name not in RANGES_ELSEWHERE:
                assert parameter.info.callback is not None, about
            if parameter.kind is Path and parameter.name not in READ:
                tried = (values.output_file, values.output_folder)
                assert parameter.info.callback in tried, about


@pytest.mark.parametrize(("command", "parameter"), NUMBERS)
def test_odd_numbers_are_refused(command, parameter, here):
    for number in ("nan", "inf", "-1", "1e30", "9" * 30):
        typed = [*command.words, *RIGHT[" ".join(command.words)]]
        replaced(command, parameter, [number], typed)
        found = answer(typed)
        assert found.exit_code != 0, typed
        said = str(found.exception) + found.output
        assert parameter.flag.strip("-") in said or parameter.name in said, said


@pytest.mark.parametrize(("command", "parameter"), OUTPUTS)
def test_an_output_is_refused_before_the_work(command, parameter, here, monkeypatch):
    is_file = parameter.info.callback is values.output_file
    places = ["text.jsonl/under", "/proc/nope", "x" * 300]
    places += ["missing/file", "folder"] if is_file else ["text.jsonl"]
    for place in places:
        typed = [*command.words, *RIGHT[" ".join(command.words)]]
        replaced(command, parameter, [place], typed)
        found = answer(typed)
        assert isinstance(found.exception, TPUValidationError), (typed, found.output)
        assert found.output == "", "nothing was begun"


@pytest.mark.parametrize("name", COMMANDS)
def test_odd_words(name, here):
    for seed in range(3):
        here()
        answer(odd_command(COMMANDS[name], random.Random(f"{name} {seed}")))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_many_odd_words(name, here):
    for seed in range(3, 100):
        here()
        answer(odd_command(COMMANDS[name], random.Random(f"{name} {seed}")))


def run_main(raises, monkeypatch, tmp_path, capsys, **variables):
    def fail():
        raise raises

    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path))
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("tpukit.cli.app.app", fail)
    monkeypatch.setattr(main, "end_on_ctrl_c", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main.run()
    return ended.value.code, capsys.readouterr().err


def test_an_error_nobody_foresaw_is_one_line(monkeypatch, tmp_path, capsys):
    code, said = run_main(KeyError("layers"), monkeypatch, tmp_path, capsys)
    (kept,) = (tmp_path / "errors").iterdir()
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith("error: unexpected KeyError: 'layers' (the details are in ")
    assert str(kept) in said
    assert "Traceback" in kept.read_text()


def test_the_traceback_is_there_for_who_asks(monkeypatch, tmp_path, capsys):
    how = (monkeypatch, tmp_path, capsys)
    code, said = run_main(KeyError("layers"), *how, TPUKIT_TRACEBACK="1")
    assert (code, "Traceback" in said, said.splitlines()[-1]) == (1, True, "KeyError: 'layers'")


def test_a_disk_that_refuses_is_a_users_error(monkeypatch, tmp_path, capsys):
    error = PermissionError(13, "Permission denied", "/data/x")
    code, said = run_main(error, monkeypatch, tmp_path, capsys)
    assert (code, said) == (2, "error: /data/x: Permission denied.\n")


def test_what_a_message_quotes_is_shortened_and_steers_no_terminal(monkeypatch, tmp_path, capsys):
    error = TPUError("no such key '\x1b[2J" + "x" * 100_000 + "'; remove it.\nOr rename it.")
    code, said = run_main(error, monkeypatch, tmp_path, capsys)
    assert code == 2
    assert said.startswith(r"error: no such key '\x1b[2Jxxx")
    assert said.endswith("xxx'; remove it.\nOr rename it.\n")
    assert len(said) < 4100


def test_a_name_that_is_no_text_can_be_shown(tmp_path):
    program = "from tpukit.cli.main import run; run()"
    words = [sys.executable, "-c", program, "config", "show", b"\xff.yaml"]
    done = subprocess.run(words, capture_output=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ")
    assert b"Traceback" not in done.stderr
