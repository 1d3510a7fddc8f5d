"""Processes below this one, found by what they were started with."""

from contextlib import suppress

import psutil


def children() -> dict[psutil.Process, str]:
    """Return every process below this one with its command line; one on its way out is none."""
    found: dict[psutil.Process, str] = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ended since, or it waits to be reaped
            found[child] = " ".join(child.cmdline())
    return found


def children_running(words: str) -> list[psutil.Process]:
    """Return the processes below this one whose command line has these words."""
    return [child for child, command in children().items() if words in command]
