"""Start a capture in this process, and end it: write the recording, then leave the program.

A captured process ends in the first call of the step without unwinding, because a `finally` block
or an exit handler of the program would write a checkpoint of arrays that do not exist.
"""
# The parts of jax that every program passes through have no public names.
# pyright: reportPrivateUsage=false

import atexit
import contextlib
import json
import os
import sys
import traceback
from typing import Any

from .arrays import forget_arrays, record_reads
from .disguise import disguise_as_slice
from .exporting import write_program
from .programs import Recorder
from .settings import CaptureState, read_settings, replace, restore, user_line

RESULT = "capture.json"


class StepReached(BaseException):
    """Raised in a notebook to leave the program at its step."""


def start_from_environment() -> None:
    """Start the capture that the environment requests; do nothing in other processes."""
    capture = read_settings()
    if capture is not None:
        start_capture(capture)


def start_capture(capture: CaptureState) -> Recorder:
    """Prepare jax in this process: the slice's devices, and recording instead of running."""
    import jax
    from jax._src import pjit, source_info_util

    if not hasattr(pjit, "_resolve_and_lower"):
        capture.failure = (
            f"jax {jax.__version__} has no function through which every program passes; "
            "captures were tried with jax 0.6.2 to 0.12.0.1"
        )
        _write(capture, None, {})
        raise SystemExit(capture.failure)
    for name in os.listdir(os.path.dirname(os.path.abspath(__file__))):
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
        source_info_util.register_exclusion(path)  # lines of the user's, not of these files
    disguise_as_slice(capture)
    record_reads(capture)
    recorder = Recorder(capture, lambda: _finish(capture, recorder))
    replace(pjit, "_resolve_and_lower", recorder.hook(pjit._resolve_and_lower))
    capture.progress(f"jax {jax.__version__} is imported; the program runs")
    if not capture.leave_by_exception:
        _watch_end(capture, recorder)
    return recorder


def finish_block(recorder: Recorder) -> None:
    """Write the recording of a block that ended before its step was called."""
    if recorder.programs:
        with contextlib.suppress(StepReached):
            recorder.finish()


def end_capture() -> None:
    """Restore jax in a process that continues."""
    import jax

    restore()
    forget_arrays()
    jax.clear_caches()


def _watch_end(capture: CaptureState, recorder: Recorder) -> None:
    """Write the recording if the program ends or fails before its first step."""
    shown = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        hidden = ("<", os.path.dirname(os.path.abspath(__file__)))
        frames = [one for one in traceback.extract_tb(trace) if not one.filename.startswith(hidden)]
        theirs = [one for one in frames if "site-packages" not in one.filename] or frames
        where = f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else user_line()
        text = str(error).strip().splitlines()
        capture.failure = f"{kind.__name__}: {text[0] if text else ''} ({where})"
        shown(kind, error, trace)

    sys.excepthook = hook
    atexit.register(lambda: _finish(capture, recorder))


def _finish(capture: CaptureState, recorder: Recorder) -> None:
    """Write the programs of the step for TPU, and leave the user's program at once."""
    chosen = recorder.chosen() if not capture.failure else {}
    code = 0
    try:
        _write(capture, recorder, chosen)
    except Exception as error:  # noqa: BLE001 - the parent reports the reason
        traceback.print_exc()
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        capture.failure = f"lowering for TPU failed: {type(error).__name__}: {first}"
        _write(capture, recorder, {})
        code = 1
    if capture.leave_by_exception:
        raise StepReached
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write(capture: CaptureState, recorder: Any, chosen: dict[Any, int]) -> None:
    import jax

    written = []
    for number, (program, calls) in enumerate(chosen.items()):
        capture.progress(f"lower {program.name} for TPU")
        path = os.path.join(capture.folder, f"program-{number}.bin")
        facts = write_program(program, capture, path)
        written.append({**facts, "calls_per_step": calls})
    listed = [] if recorder is None else [one.row() for one in recorder.programs.values()]
    result = {
        "programs": written,
        "listed": listed,
        "jax": jax.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "processes": capture.processes,
        "libtpu_init_args": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "failure": capture.failure,
        "command": sys.argv,
        **capture.findings(),
    }
    path = os.path.join(capture.folder, RESULT)
    with open(f"{path}.partial", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(f"{path}.partial", path)
