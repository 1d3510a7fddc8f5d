"""End a command on Ctrl-C and SIGTERM at once, with its children and unfinished files.

Python raises Ctrl-C as an exception wherever the main thread is. Inside a callback of jax it is
printed and dropped, a thread pool first waits for its threads, and a call into C++ does not notice
it until it returns. So a command does not unwind. Its handler undoes what is registered here, the
newest first, and ends the process. If the main thread does not run the handler in time, a second
thread does the same.

SIGTERM, by which service managers and schedulers end a command, is handled in the same way, unless
the command has its own handler.

A library must not do that to the program that uses it, so only `tpukit.cli` calls `end_on_ctrl_c`.
Without that call nothing here has an effect, and Ctrl-C is a KeyboardInterrupt as usual.
"""

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from ..exit_codes import ExitCode

PATIENCE_S = 1.4
"""How long a command that ends well may take for it, such as a run that saves its last step."""
_CHANCE_S = 0.3  # for the main thread to run its handler, before another one does its work
_LIMIT_S = 1.8  # until the process ends, whatever is left to undo
_END_OF_BAR = "\x1b[?25h\n"  # a bar hides the cursor, and "^C" stands in its line

# Held while a child is being started, and for good once the process ends: none starts after that.
_starting_or_ending = threading.Lock()
_holds = threading.Event()
_pressed = threading.Event()
_ending = threading.Event()
_ender: list[int] = []  # the thread that ends the process
_code: list[int] = []  # the exit code, from the first signal on
_undo: list[Callable[[], None]] = []
_patience_s: list[float] = []


def end_on_ctrl_c() -> None:
    """End this process on Ctrl-C (130) or SIGTERM (143), after undoing what is registered."""
    signals = [signal.SIGINT, signal.SIGTERM]
    # One that is ignored stays so: `tpukit … &` in a script, or nohup.
    heard = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    if not heard:
        return
    arriving, telling = os.pipe()
    os.set_blocking(telling, False)
    signal.set_wakeup_fd(telling, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_leave_signals_alone)
    for number in heard:
        signal.signal(number, _on_signal)
    threading.Thread(target=_watch, args=(arriving,), name="tpukit-ctrl-c", daemon=True).start()
    if signal.SIGINT in heard:
        _holds.set()


def ctrl_c_ends_process() -> bool:
    """Return whether `end_on_ctrl_c` was called, as it is in every command."""
    return _holds.is_set()


def was_interrupted() -> bool:
    """Return whether Ctrl-C was pressed in a command that is finishing its work."""
    return _pressed.is_set()


def exit_code() -> int:
    """Return the exit code of a command that a signal ends."""
    return _code[0] if _code else ExitCode.INTERRUPTED


@contextmanager
def undone_if_interrupted(undo: Callable[[], None]) -> Generator[None]:
    """Call `undo` if Ctrl-C ends the process inside the block; it must be quick."""
    _undo.append(undo)
    try:
        yield
    finally:
        _undo.remove(undo)


@contextmanager
def whole_or_not_begun() -> Generator[None]:
    """Delay Ctrl-C until the end of the block.

    This is for short blocks, such as starting a child and registering that it must be killed.
    """
    with _starting_or_ending:
        yield
    if _pressed.is_set() and not _patience_s:
        _end()


@contextmanager
def ending_well(patience_s: float = PATIENCE_S) -> Generator[None]:
    """Leave the first Ctrl-C to the block's own handler for a time; the second ends at once."""
    _patience_s.append(patience_s)
    try:
        yield
    finally:
        _patience_s.pop()


def _leave_signals_alone() -> None:
    """Restore default signals in a forked child, because only its parent may undo things."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)


def _on_signal(number: int, frame: FrameType | None) -> None:
    _code.append(128 + number)
    _pressed.set()
    if not _starting_or_ending.locked() or _ending.is_set():
        _end()
    # Else a child is being started, and whoever starts it ends the process next.


def _watch(arriving: int) -> None:
    """End the process if the main thread does not do so in time."""
    _next_ctrl_c(arriving, None)
    deadline = time.monotonic() + _LIMIT_S
    _pressed.set()
    patience_s = _patience_s[-1] if _patience_s else _CHANCE_S
    _next_ctrl_c(arriving, None if math.isinf(patience_s) else patience_s)
    # What is undone may take as long as a slow disk does.
    limit = threading.Timer(max(_CHANCE_S, deadline - time.monotonic()), os._exit, [exit_code()])
    limit.daemon = True
    limit.start()
    _end()


def _next_ctrl_c(arriving: int, timeout_s: float | None) -> None:
    """Wait for Ctrl-C, or for SIGTERM in a command without its own handler."""
    while select.select([arriving], [], [], timeout_s)[0]:
        number = os.read(arriving, 1)[0]
        handled_here = signal.getsignal(number) is _on_signal
        if number == signal.SIGINT or (number == signal.SIGTERM and handled_here):
            _code.append(128 + number)
            return


def _end() -> None:
    """Undo what is registered, print one line, and end the process; only the first call acts."""
    if threading.get_ident() in _ender:
        return  # a second Ctrl-C, while the first is answered
    if _ending.is_set() or not _starting_or_ending.acquire(timeout=_LIMIT_S):
        threading.Event().wait()  # another thread is at it
    _ender.append(threading.get_ident())
    _ending.set()
    for undo in reversed(_undo):
        with contextlib.suppress(Exception):
            undo()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        # Not through a stream, whose lock the interrupted code may hold.
        how = "terminated" if exit_code() == ExitCode.TERMINATED else "interrupted"
        os.write(2, f"{_END_OF_BAR if os.isatty(2) else ''}{how}\n".encode())
    os._exit(exit_code())
