"""Run a module in a child process that may hang or abort, and return its JSON reply.

libtpu can block for minutes and can abort the whole process on unusual input, so every use of it
goes through here. The child reads a JSON request from standard input and writes its JSON reply to
the file named in `TPUKIT_CHILD_REPLY`, because libtpu prints to standard output.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import MissingExtraError, TPUBackendError
from ..hardware.catalog import SLICE_FOR_LIBTPU
from ..plain_data import JsonMapping, JsonObject
from .files import temporary_folder, write_json
from .interruption import undone_if_interrupted, whole_or_not_begun

REPLY_VARIABLE = "TPUKIT_CHILD_REPLY"
PARENT_VARIABLE = "TPUKIT_CHILD_PARENT"
STDERR_LINES_SHOWN = 8
POLL_S = 0.1
ORPHAN_CHECK_S = 1.0
# How Python and jax say that libtpu is not installed.
NO_LIBTPU = ("No module named 'libtpu'", "JAX TPU support not installed")


class ChildError(TPUBackendError):
    """A child process failed. `kind` is the exception's name there, or "timeout" or "exit"."""

    def __init__(self, message: str, *, kind: str, log: str = "") -> None:
        self.kind = kind
        self.log = log
        super().__init__(message)


def offline_environment(
    extra: Mapping[str, str] | None = None, *, accelerator_type: str = SLICE_FOR_LIBTPU
) -> dict[str, str]:
    """Return the environment in which libtpu compiles on a machine without a TPU.

    `TPU_SKIP_MDS_QUERY` saves minutes of metadata look-ups, and `ALLOW_MULTIPLE_LIBTPU_LOAD` lets a
    second process load libtpu. Accelerator type and host name replace queries of libtpu to the
    machine. Flags that the user set for a real TPU are not inherited.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LIBTPU_INIT_ARGS", "XLA_FLAGS") and not name.startswith("TPU_")
    }
    environment.update(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        NO_GCE_CHECK="true",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_ACCELERATOR_TYPE=accelerator_type,
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_STDERR_LOG_LEVEL="3",
        TPU_MIN_LOG_LEVEL="3",
        TF_CPP_MIN_LOG_LEVEL="3",
        JITDUMPDIR=os.devnull,  # or libtpu's LLVM writes a folder ~/.debug for Linux perf
    )
    environment.update(extra or {})
    return environment


def run_child(
    module: str,
    request: JsonMapping,
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> JsonObject:
    """Run `python -m module` with `request` and return its reply.

    Args:
        module: A module whose `__main__` calls `serve_request`.
        request: The request, as JSON data.
        timeout_s: After this long the child and everything it started are killed.
        environment: The whole environment of the child; `offline_environment()` by default.

    Raises:
        ChildError: The child raised an error, died or ran out of time.
        MissingExtraError: The child could not import libtpu.
    """
    reply = watch_child(module, request, timeout_s=timeout_s, environment=environment)
    assert reply is not None  # only a watched child is stopped
    return reply


def watch_child(
    module: str,
    request: JsonMapping,
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    stop_when: Callable[[], bool] | None = None,
) -> JsonObject | None:
    """Run a child like `run_child`, but stop it and return None once `stop_when()` is true.

    `stop_when` is called several times per second, for callers that need only the files the child
    has written. It may also report progress.
    """
    with temporary_folder("tpukit-child-") as folder:
        request_path, reply_path = folder / "request.json", folder / "reply.json"
        log_path = folder / "log.txt"
        request_path.write_text(json.dumps(request))
        child_environment = dict(offline_environment() if environment is None else environment)
        child_environment[REPLY_VARIABLE] = str(reply_path)
        child_environment[PARENT_VARIABLE] = str(os.getpid())
        code = run_in_group(
            [sys.executable, "-m", module],
            input_path=request_path,
            log_path=log_path,
            environment=child_environment,
            timeout_s=timeout_s,
            stop_when=stop_when,
        )
        if code is None:
            return None
        log = log_path.read_text(errors="replace")
        if not reply_path.exists():
            raise ChildError(_death_notice(module, code, log), kind="exit", log=log)
        reply = json.loads(reply_path.read_text())
    if "error" in reply:
        error = reply["error"]
        if any(sign in error["message"] for sign in NO_LIBTPU):
            raise MissingExtraError("tpu", needed_for="The offline TPU compiler", module="libtpu")
        raise ChildError(error["message"], kind=error["kind"], log=log)
    return reply["ok"]


def run_in_group(
    command: Sequence[str],
    *,
    log_path: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    input_path: Path | None = None,
    stop_when: Callable[[], bool] | None = None,
) -> int | None:
    """Run a command in its own session, kill the processes it leaves, and return its exit code.

    Args:
        command: The program and its arguments.
        log_path: File for all its output.
        environment: The whole environment of the command.
        timeout_s: After this long the command and everything it started are killed.
        input_path: Its standard input; empty by default.
        stop_when: Called several times per second; once it returns True, the command is killed
            and None is returned.

    Raises:
        ChildError: It ran out of time.
    """
    # Also after Ctrl-C or an error: libtpu must not stay behind the user's back.
    until_killed = contextlib.ExitStack()
    # Files, not pipes: a process the child leaves behind could hold a pipe open for ever.
    with (
        (input_path or Path(os.devnull)).open("rb") as asked,
        log_path.open("wb") as chatter,
        whole_or_not_begun(),
    ):
        process = subprocess.Popen(
            list(command),
            stdin=asked,
            stdout=chatter,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,  # so that everything it starts can be killed with it
        )
        until_killed.callback(process.wait)
        until_killed.callback(_kill_group, process.pid)
        until_killed.enter_context(undone_if_interrupted(lambda: _kill_group(process.pid)))
    try:
        with until_killed:
            return _wait(process, timeout_s, stop_when)
    except subprocess.TimeoutExpired:
        raise ChildError(
            f"{' '.join(command[1:])} did not answer within {timeout_s:g} s and was killed; "
            "allow more time, or ask for less at once.",
            kind="timeout",
            log=log_path.read_text(errors="replace"),
        ) from None


def serve_request(answer: Callable[[JsonObject], JsonMapping]) -> None:
    """Serve the child's side: read the request, call `answer`, write its reply or its error."""
    # Not os.getppid(), which is another process where the parent has ended by now.
    parent = int(os.environ[PARENT_VARIABLE])
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    request = json.loads(sys.stdin.buffer.read())
    reply: JsonObject
    try:
        reply = {"ok": answer(request)}
    except Exception as error:  # noqa: BLE001 - the parent decides what each error means
        reply = {"error": {"kind": type(error).__name__, "message": str(error)}}
    path = Path(os.environ[REPLY_VARIABLE])
    write_json(path, reply)


def _wait(
    process: subprocess.Popen[bytes], timeout_s: float, stop_when: Callable[[], bool] | None
) -> int | None:
    """Return the exit code, or None once `stop_when` is true."""
    if stop_when is None:
        return process.wait(timeout_s)
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_S)
        if stop_when():
            return None
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, timeout_s)


def _end_with_parent(parent: int) -> None:
    # A parent ended by SIGKILL cannot clean up; a compile of minutes should not outlive it.
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_S)
    os.killpg(0, signal.SIGKILL)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _death_notice(module: str, code: int, log: str) -> str:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    tail = "\n".join(line for line in log.splitlines()[-STDERR_LINES_SHOWN:] if line.strip())
    return f"{module} {how} before it answered. Its last words:\n{tail or '(none)'}"
