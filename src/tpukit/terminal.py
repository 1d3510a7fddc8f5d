"""Consoles that print every text unchanged, without markup and emoji codes.

Texts come from users, compilers and other machines, and contain brackets. With markup, `pip install
'tpukit[tpu]'` would lose its extra and `[/]` would be an error. Styles are given by
`rich.text.Text`, never by marks inside a string.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TextColumn

_LIMITLESS = 100_000
_WIDE = 200


def open_console(*, stderr: bool = False, **options: Any) -> "Console":
    """Return a console on standard output or standard error.

    Args:
        stderr: Whether it writes to standard error.
        **options: Of `rich.console.Console`.
    """
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, **options)


def width_for(console: "Console", renderable: Any) -> int:
    """Return the columns to print in: a terminal's width, or on a pipe as many as needed.

    So names that a person copies or a script reads are not wrapped.
    """
    from rich.measure import Measurement

    if console.is_terminal:
        return console.width
    options = console.options.update(width=_LIMITLESS)
    needed = Measurement.get(console, options, renderable).maximum
    # Something that fills every width, as `top` does, gets a wide one.
    return max(console.width, needed if needed < _LIMITLESS else _WIDE)


def text_column(template: str) -> "TextColumn":
    """Return a column of a progress bar that shows its text as it is."""
    from rich.progress import TextColumn

    return TextColumn(template, markup=False)
