"""Consoles that show every text as it is: nothing in it is markup or the code of an emoji.

Texts come from users, compilers and other machines, and hold brackets: `pip install 'tpukit[tpu]'`
would lose its extra, `bf16[8,128]` stay, and `[/]` end in an error. Style is given by
`rich.text.Text`, never by marks inside of a string.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TextColumn


def open_console(*, stderr: bool = False, **options: Any) -> "Console":
    """Return a console on standard output or standard error.

    Args:
        stderr: Whether it writes to standard error.
        **options: Of `rich.console.Console`.
    """
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, **options)


def text_column(template: str) -> "TextColumn":
    """Return a column of a progress bar that shows its text as it is."""
    from rich.progress import TextColumn

    return TextColumn(template, markup=False)
