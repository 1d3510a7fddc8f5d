"""Validate options: numbers in range, writable outputs, and options that exclude each other.

Validators are typer callbacks, so a wrong value ends a command before it starts. A test checks that
every number and path of the command line has one.
"""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import typer

from ..errors import ConfigError
from ..runtime.ranges import Range

Value = TypeVar("Value")  # what typer parsed: one value, several, or none


def within(accepted: Range) -> Callable[[typer.CallbackParam, Value], Value]:
    """Return a callback that accepts numbers in this range."""

    def check(param: typer.CallbackParam, value: Value) -> Value:
        for number in _each(value):
            accepted.check(_named(param), number)
        return value

    return check


def output_file(param: typer.CallbackParam, value: Value) -> Value:
    """Accept a path that a file can be written to; it is tried before hours of work."""
    from ..runtime.files import try_output_file

    for path in _each(value):
        try_output_file(path)
    return value


def output_folder(param: typer.CallbackParam, value: Value) -> Value:
    """Accept a path that a folder can be created at, and try it now."""
    from ..runtime.files import try_output_folder

    for path in _each(value):
        try_output_folder(path)
    return value


def run_folder(param: typer.CallbackParam, value: Value) -> Value:
    """Accept an address, which a run tries itself, or a path as `output_folder` does."""
    from ..runtime.files import try_output_folder
    from ..runtime.object_store import is_address

    for path in _each(value):
        if not is_address(path):
            try_output_folder(Path(path))
    return value


def _each(value: object) -> Iterable[Any]:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)


def _named(param: typer.CallbackParam) -> str:
    """Return the longest spelling of an option, or the name of an argument."""
    return max(param.opts, key=len) if param.opts else str(param.name)


def refuse(called: typer.Context, names: Collection[str], why: str) -> None:
    """Refuse some options if they were typed.

    An option that is accepted without effect would mislead its user.

    Args:
        called: The context of the command.
        names: Names of the command's parameters.
        why: The message after the option's name.

    Raises:
        ConfigError: One of them was typed.
    """
    for param in called.command.params:
        source = called.get_parameter_source(param.name or "")
        if param.name in names and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"{max(param.opts, key=len)} {why}")


def refuse_all_but(called: typer.Context, names: Collection[str], why: str) -> None:
    """Refuse every typed option that is not in `names`; see `refuse`."""
    others = [one.name for one in called.command.params if one.name and one.name not in names]
    refuse(called, others, why)
