"""The live screen: drawn anew at a rate, with keys where the terminal can be read."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.live import Live

from ...runtime.interruption import undone_if_interrupted
from .feed import Feed
from .screen import Screen, View

VIEWS: dict[str, View] = {"c": "chips", "h": "hosts", "r": "rolled up"}
ESCAPE = "\x1b"


@dataclass(frozen=True)
class PressedKeys:
    """What keys have chosen so far."""

    view: View = "auto"
    by_duty: bool = False
    help: bool = False
    quit: bool = False

    def press(self, key: str) -> "PressedKeys":
        """Return what holds after a key; pressing a view again goes back to the automatic one."""
        if key in ("q", "Q", "\x04"):
            return replace(self, quit=True)
        if key in VIEWS:
            return replace(self, view="auto" if self.view == VIEWS[key] else VIEWS[key])
        if key == "s":
            return replace(self, by_duty=not self.by_duty)
        return replace(self, help=key == "?" and not self.help)


def watch(feed: Feed, *, rate_s: float, console: Console) -> None:
    """Show snapshots until q is pressed."""
    keys = PressedKeys()
    with (
        single_keys() as next_key,
        Live(console=console, screen=True, auto_refresh=False) as live,
        undone_if_interrupted(live.stop),
    ):
        while not keys.quit:
            snapshot = feed.read()
            due = time.monotonic() + rate_s
            while True:
                live.update(
                    Screen(snapshot, keys.view, console.height, keys.by_duty, keys.help),
                    refresh=True,
                )
                key = next_key(max(0.0, due - time.monotonic()))
                if key is None:
                    break
                keys = keys.press(key)
                if keys.quit:
                    break


@contextlib.contextmanager
def single_keys() -> Generator[Callable[[float], str | None]]:
    """Read keys one by one, unseen; without a terminal to read from there are none."""
    if not sys.stdin.isatty():
        yield _wait
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def restore() -> None:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)

    def next_key(timeout_s: float) -> str | None:
        if not select.select([terminal], [], [], timeout_s)[0]:
            return None
        key = os.read(terminal, 32).decode(errors="replace")
        if not key:
            time.sleep(timeout_s)  # the terminal is gone: do not spin
            return None
        return ESCAPE if key.startswith(ESCAPE) else key[0]

    with undone_if_interrupted(restore):
        try:
            tty.setcbreak(terminal)
            yield next_key
        finally:
            restore()


def _wait(timeout_s: float) -> str | None:
    time.sleep(timeout_s)
    return None
