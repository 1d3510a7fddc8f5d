"""The command line as data: every command and option, found in the application itself."""

import types
import typing
from dataclasses import dataclass
from pathlib import Path

import typer

from tpukit.cli.app import app


@dataclass(frozen=True)
class Parameter:
    """One option or argument: how it is typed, and what typer knows of it."""

    name: str
    flag: str  # "" for an argument
    kind: type
    required: bool
    info: object


@dataclass(frozen=True)
class Command:
    """One command: the words that call it, and what may stand behind them."""

    words: tuple[str, ...]
    parameters: tuple[Parameter, ...]


def every_command():
    """Return each command by the words that call it, such as "data prepare"."""
    found = {}

    def walk(one, words):
        for group in one.registered_groups:
            walk(group.typer_instance, (*words, group.name))
        for command in one.registered_commands:
            name = command.name or command.callback.__name__.replace("_", "-")
            called = (*words, name)
            found[" ".join(called)] = Command(called, tuple(_parameters(command.callback)))

    walk(app, ())
    return found


def _parameters(function):
    hints = typing.get_type_hints(function, include_extras=True)
    defaults = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    with_default = names[len(names) - len(defaults) :]
    for name in names:
        if hints[name] is typer.Context:  # what was called, not something that is typed
            continue
        kind, info = typing.get_args(hints[name])[:2]
        while typing.get_origin(kind) in (list, types.UnionType, typing.Union):
            kind = next(one for one in typing.get_args(kind) if one is not type(None))
        is_option = isinstance(info, typer.models.OptionInfo)
        spelled = [one for one in info.param_decls or () if one.startswith("--")]
        flag = (spelled or [f"--{name.replace('_', '-')}"])[0] if is_option else ""
        yield Parameter(name, flag, kind, name not in with_default, info)


NUMBERS = (int, float)
PATHS = (Path,)
