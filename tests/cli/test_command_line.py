"""The command line as a whole: one set of words, help that can be copied, nobody left waiting."""

import threading
import time

import pytest
import typer
from command_line import every_command
from typer.testing import CliRunner

from tpukit import TPUError, __version__
from tpukit.cli import main
from tpukit.cli.app import app
from tpukit.cli.examples import EXAMPLES
from tpukit.cli.output import Announcer

COMMANDS = every_command()
# They serve or take the terminal over until Ctrl-C: there is no answer to write down.
NO_ANSWER = {"dashboard", "pods ssh", "pods emulate", "mcp"}
# Dollars of a plan, compiles of a search; a host by its number, an address to listen on; whether to
# serve, and how many.
WITH_TWO_KINDS = {"--budget", "--host", "--serve"}


def ask(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def click_command():
    top = typer.main.get_command(app)

    def find(name):
        found = top
        for word in name.split():
            found = found.commands[word]
        return found

    return find


def test_the_version():
    assert ask("--version").stdout == f"tpukit {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_every_option_whole_and_an_example(name, click_command):
    shown = ask(*name.split(), "--help")
    assert shown.exit_code == 0, shown.output
    assert "Examples:" in shown.stdout
    for parameter in click_command(name).params:
        for spelled in parameter.opts:
            assert not spelled.startswith("-") or spelled in shown.stdout
    for line in EXAMPLES[name]:
        assert f"\n    {line}\n" in shown.stdout
    assert "…" not in "".join(word for word in shown.stdout.split() if word.startswith("--"))


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_commands_that_can_be_typed(name, click_command):
    import shlex

    command = click_command(name)
    for line in EXAMPLES[name]:
        words = shlex.split(line)
        called = ["tpukit", *name.split()]
        assert words[: len(called)] == called
        context = typer.Context(command, info_name=name, resilient_parsing=True)
        command.make_parser(context).parse_args(words[len(called) :])


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NO_ANSWER))
def test_every_answer_can_be_json(name, click_command):
    (found,) = [one for one in click_command(name).params if one.name == "json"]
    assert found.opts == ["--json"]


def test_options_have_one_meaning_everywhere(click_command):
    """The same name is the same kind of value in every command."""
    kinds = {}
    for name, command in COMMANDS.items():
        spelled = {one.name: one.opts for one in click_command(name).params}
        for parameter in command.parameters:
            for word in spelled[parameter.name]:
                if word.startswith("--"):
                    kinds.setdefault(word, {}).setdefault(parameter.kind, []).append(name)
    differing = {flag: found for flag, found in kinds.items() if len(found) > 1}
    assert differing.keys() <= WITH_TWO_KINDS, differing


@pytest.mark.parametrize(
    ("words", "offered", "never"),
    [
        ("tpukit check tin", "tiny", "llama3.1-8b"),
        ("tpukit train --on v6e-6", "v6e-64", "v6e-8"),
        ("tpukit pods lo", "logs", "lint"),
        ("tpukit check tiny --mem", "--memory-only", "--mesh"),
    ],
)
def test_a_shell_is_told_what_may_follow(words, offered, never):
    asked = {"_TPUKIT_COMPLETE": "complete_bash", "COMP_WORDS": words}
    cword = str(len(words.split()) - 1)
    shown = CliRunner().invoke(app, [], prog_name="tpukit", env={**asked, "COMP_CWORD": cword})
    found = shown.stdout.split()
    assert offered in found, shown.output
    assert never not in found


def test_debug_shows_the_traceback(monkeypatch, capsys):
    monkeypatch.setenv("TPUKIT_TRACEBACK", "")  # and back to what it was, after the test
    assert main.tell(KeyError("layers")) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert ask("--debug", "slice", "v9z-8").exit_code != 0
    with pytest.raises(KeyError) as caught:
        raise KeyError("layers")
    assert main.tell(caught.value) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_nobody_waits_without_a_word(monkeypatch, capsys):
    monkeypatch.setattr(Announcer, "SILENCE_S", 0.02)
    say = Announcer()
    say("compiling")
    deadline = time.monotonic() + 5
    while "still: compiling" not in capsys.readouterr().err and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.monotonic() < deadline
    Announcer.hush()
    time.sleep(0.05)
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_command_that_fails_is_silent_afterwards(monkeypatch):
    monkeypatch.setattr(Announcer, "SILENCE_S", 0.02)
    shown = ask("check", "tiny", "--on", "v9z-8")
    assert isinstance(shown.exception, TPUError)
    assert "checking tiny" in shown.stderr
    speaking = [one for one in threading.enumerate() if one.name == "announcer"]
    for one in speaking:
        one.join(timeout=5)
    assert not any(one.is_alive() for one in speaking)
