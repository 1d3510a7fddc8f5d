"""Run a program and pass on its lines as they appear; run tpukit with another Python."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..files import temporary_folder
from ..interruption import undone_if_interrupted, whole_or_not_begun
from ..progress import Progress, silent

_POLL_S = 0.1
_PATIENCE_S = 1.0  # for a program that Ctrl-C ends to clean up behind itself
# What would lead another interpreter to this one's packages, and flags for this one's jaxlib and
# libtpu, which end the process of one that does not know them.
_OF_THIS_PYTHON = (
    *("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"),
    *("XLA_FLAGS", "LIBTPU_INIT_ARGS"),
)


@dataclass(frozen=True)
class EndedProgram:
    """A finished program's exit code and output."""

    code: int
    output: str
    errors: str


def run_followed(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    follow: Literal["output", "errors"] = "errors",
    progress: Progress = silent,
) -> EndedProgram:
    """Run a program to its end, and pass on its lines as they appear.

    It stays in this process's group, so Ctrl-C at a terminal reaches it too. When this process
    ends, the program is interrupted and, if it does not end, killed.

    Args:
        command: The program and its arguments.
        environment: Its environment; `outside_environment()` by default.
        folder: Where it runs; here by default.
        follow: Which of the two streams is passed on.
        progress: Called with each line.
    """
    with temporary_folder("tpukit-followed-") as written:
        # Files, not pipes: a process that the program leaves behind could hold a pipe open.
        paths = {"output": written / "output.txt", "errors": written / "errors.txt"}
        over = contextlib.ExitStack()
        with (
            paths["output"].open("wb") as output,
            paths["errors"].open("wb") as errors,
            whole_or_not_begun(),
        ):
            process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=outside_environment() if environment is None else dict(environment),
                cwd=folder,
            )
            over.callback(_interrupt, process)
            over.enter_context(undone_if_interrupted(lambda: _interrupt(process)))
        with over, paths[follow].open(encoding="utf-8", errors="replace") as lines:
            partial = ""
            while True:
                ended = process.poll() is not None  # first: what it wrote by then is there to read
                *whole, partial = (partial + lines.read()).split("\n")
                for line in whole:
                    progress(line)
                if ended:
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        texts = {name: path.read_text(errors="replace") for name, path in paths.items()}
    return EndedProgram(process.returncode, **texts)


def run_tpukit(
    python: Path, arguments: Sequence[str], *, progress: Progress = silent
) -> EndedProgram:
    """Run a tpukit command from this same source with another interpreter.

    So two results differ by the toolchain only, not by the version of tpukit.

    Args:
        python: An interpreter whose environment has tpukit's dependencies.
        arguments: The arguments of `tpukit`.
        progress: Called with each line of standard error.
    """
    package = Path(__file__).parents[2]
    with temporary_folder("tpukit-source-") as folder:
        # A link beside nothing else: the folder above the package may hold this Python's jax.
        (folder / package.name).symlink_to(package, target_is_directory=True)
        own = os.environ.get("PYTHONPATH", "")  # where a user's own modules may be
        environment = {
            **outside_environment(),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), own))),
            "PYTHONUNBUFFERED": "1",
        }
        command = [python, "-m", package.name, *arguments]
        return run_followed(command, environment=environment, progress=progress)


def outside_environment() -> dict[str, str]:
    """Return this process's environment without the variables of its own interpreter."""
    return {name: value for name, value in os.environ.items() if name not in _OF_THIS_PYTHON}


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a program like Ctrl-C, so that it cleans up; kill it if it does not end."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
        if process.poll() is None:
            process.kill()
            process.wait()
