"""One way to show a result: rich text for people, JSON for machines, from the same object."""

import json as json_module
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol


class Presentable(Protocol):
    """A result that can show itself to a person and to a machine."""

    def __rich__(self) -> Any: ...

    def to_dict(self) -> Mapping[str, Any]:
        """The result as JSON data."""
        ...


def show(result: Presentable, *, json: bool = False) -> None:
    """Write `result` to standard output, as JSON when `json` is set."""
    if json:
        sys.stdout.write(json_module.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
        return
    from rich.console import Console

    Console().print(result)


@contextmanager
def working(what: str) -> Generator[None]:
    """Say on standard error that something slow is under way: a spinner, or a plain line."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        sys.stderr.write(f"{what} ...\n")
        sys.stderr.flush()
        yield
