"""What the value of an option may be: a number in its range, an output that can be written.

Each is a callback of typer's, so that a wrong value ends a command before it begins. Every number
and every path of the command line has one; a test looks that none is forgotten.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import typer

from ..runtime.ranges import Range

Value = TypeVar("Value")  # what typer parsed: one value, several, or none


def within(accepted: Range) -> Callable[[typer.CallbackParam, Value], Value]:
    """Take numbers of this range, and nothing else."""

    def check(param: typer.CallbackParam, value: Value) -> Value:
        for number in _each(value):
            accepted.check(_named(param), number)
        return value

    return check


def output_file(param: typer.CallbackParam, value: Value) -> Value:
    """Take a path at which a file can be written, tried now: the work may take hours."""
    from ..runtime.files import try_output_file

    for path in _each(value):
        try_output_file(path)
    return value


def output_folder(param: typer.CallbackParam, value: Value) -> Value:
    """Take a path at which a folder can be made or filled, tried now."""
    from ..runtime.files import try_output_folder

    for path in _each(value):
        try_output_folder(path)
    return value


def _each(value: object) -> Iterable[Any]:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)


def _named(param: typer.CallbackParam) -> str:
    """The option as it is typed, or what an argument is called."""
    return max(param.opts, key=len) if param.opts else str(param.name)
