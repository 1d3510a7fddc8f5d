"""Run the user's command with the capture loaded, and read the recording.

The command runs in its own session, without a network unless requested, and is killed with all its
children. It needs neither tpukit nor libtpu in its environment: the files it loads are linked into
a temporary folder that comes first in PYTHONPATH.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import CaptureError
from ..hardware import Slice
from ..runtime.child import ChildError, run_in_group
from ..runtime.files import finish_folder, folder_beside, temporary_folder
from ..runtime.progress import Progress, silent
from . import isolation
from .captured import FORMAT, RESULT, SETTINGS, Captured, ListedProgram, read_capture
from .topology import devices_of_slice

DEFAULT_TIMEOUT_S = 900.0
SHIM = Path(__file__).parent / "shim"
_LINES_SHOWN = 12
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S+")
_OFFLINE = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "file:///dev/null",
    "HF_HUB_OFFLINE": "1",
}


def run_captured(
    command: Sequence[str],
    on: Slice | str,
    *,
    program: str | None = None,
    network: bool = False,
    timeout_s: float | None = None,
    keep: Path | None = None,
    progress: Progress = silent,
) -> Captured:
    """Run a command as if it were on a slice, up to the first call of its training step.

    Args:
        command: The program and its arguments, as they are typed.
        on: The slice.
        program: The name of the jitted function to capture instead of the training step.
        network: Whether the command may reach other machines, for data in a bucket.
        timeout_s: The command is killed after this long.
        keep: Folder to keep the capture in.
        progress: Called with each stage as it is reached.

    Raises:
        CaptureError: Nothing was captured; the message names the reason and the user's line.
    """
    target = Slice.parse(on) if isinstance(on, str) else on
    if not command:
        raise CaptureError("there is no command after --; write it as you would type it.")
    if shutil.which(command[0]) is None:
        raise CaptureError(f"{command[0]!r} is not a command here; activate its environment.")
    if keep is not None and keep.is_dir() and any(keep.iterdir()) and not (keep / RESULT).is_file():
        raise CaptureError(
            f"{keep} contains something other than a capture, so it is not replaced; name another "
            "folder with --keep."
        )
    with temporary_folder("tpukit-capture-") as folder:
        settings = capture_settings(target, folder, program=program)
        about = {"format": FORMAT, "on": str(target), "command": list(command), "state": settings}
        (folder / SETTINGS).write_text(json.dumps(about), encoding="utf-8")
        environment = _environment(folder, network=network)
        words = list(command)
        if not network:
            words = [sys.executable, "-I", str(Path(isolation.__file__)), *words]
        progress(f"run {' '.join(command)} as if on {target} ({len(settings['devices'])} devices)")
        code = _run(words, folder, environment, timeout_s or DEFAULT_TIMEOUT_S, progress)
        _refuse_failed(folder, code)
        captured = read_capture(folder)
        if keep is not None:
            _keep(folder, keep)
    if not captured.programs:
        raise CaptureError(_nothing(captured.listed, program))
    return captured


def capture_settings(target: Slice, folder: Path, *, program: str | None = None) -> dict[str, Any]:
    """Return the settings for the capture in the user's process.

    `jax.devices()` lists the devices process by process, and jax's own multihost_utils splits that
    list by process. On wide topologies the device ids have another order.
    """
    devices = [{**device, "id": number} for number, device in enumerate(devices_of_slice(target))]
    devices.sort(key=lambda device: (device["process"], device["id"]))
    chip = target.chip
    memory = chip.per_device(chip.hbm_usable_bytes).value
    return {
        "folder": str(folder),
        "devices": [{k: v for k, v in device.items() if k != "kind"} for device in devices],
        "kind": devices[0]["kind"],
        "hbm_bytes": int(memory or 0),
        "program": program,
        "flatbuffers": str(folder / "site" / "lent"),
    }


def _keep(folder: Path, keep: Path) -> None:
    """Copy a capture to its permanent folder, replacing an earlier one."""
    with folder_beside(keep) as made:
        left = shutil.ignore_patterns("site", "log.txt")
        shutil.copytree(folder, made, ignore=left, dirs_exist_ok=True)
        finish_folder(made, keep)


def _environment(folder: Path, *, network: bool) -> dict[str, str]:
    site = folder / "site"
    lent = site / "lent"
    lent.mkdir(parents=True)
    for file in SHIM.iterdir():
        if file.name != "__pycache__":
            (site / file.name).symlink_to(file)
    writer = importlib.util.find_spec("flatbuffers")
    if writer is not None and writer.origin:
        (lent / "flatbuffers").symlink_to(Path(writer.origin).parent)
    theirs = os.environ.get("PYTHONPATH", "")
    flags = _DEVICE_COUNT.sub("", os.environ.get("XLA_FLAGS", "")).strip()
    return {
        **os.environ,
        **({} if network else _OFFLINE),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(site), theirs))),
        "TPUKIT_CAPTURE": str(folder / SETTINGS),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "TPU_SKIP_MDS_QUERY": "1",
    }


def _run(
    words: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    timeout_s: float,
    progress: Progress,
) -> int:
    told = folder / "progress.txt"
    shown = 0

    def follow() -> bool:
        nonlocal shown
        lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
        for line in lines[shown:]:
            progress(line)
        shown = len(lines)
        return False

    try:
        code = run_in_group(
            words,
            log_path=folder / "log.txt",
            environment=environment,
            timeout_s=timeout_s,
            stop_when=follow,
        )
    except ChildError:
        last = told.read_text(encoding="utf-8").splitlines()[-1:] if told.exists() else []
        raise CaptureError(
            f"the program did not reach its training step within {timeout_s:g} s (last: "
            f"{last[0] if last else 'jax was not imported'}); allow more with --timeout, or name "
            "the program to capture with --program."
        ) from None
    follow()
    return 0 if code is None else code


def _refuse_failed(folder: Path, code: int) -> None:
    result = folder / RESULT
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    tail = "\n".join(line for line in log.splitlines()[-_LINES_SHOWN:] if line.strip())
    if not result.exists():
        reason = (
            f"the program ended with code {code} before it imported jax"
            if code
            else "the program ended, and jax was not imported in a way that the capture sees "
            "(python -I and -E ignore PYTHONPATH)"
        )
        raise CaptureError(f"nothing was captured: {reason}. Its last lines:\n{tail or '(none)'}")
    failure: str = json.loads(result.read_text(encoding="utf-8"))["failure"]
    refuse_failure(failure, f" Its last lines:\n{tail or '(none)'}")


def refuse_failure(failure: str, more: str = "") -> None:
    """Raise the error that kept a program from reaching its step.

    Raises:
        CaptureError: `failure` is not empty.
    """
    if failure:
        raise CaptureError(f"the program ended before its step: {failure}.{more}")


def _nothing(listed: Sequence[ListedProgram], program: str | None) -> str:
    names = sorted({recorded.name for recorded in listed})
    if program is not None:
        return (
            f"the program ended without a jitted function called {program!r}; it compiled "
            f"{', '.join(names) or 'no large program'} (see --list-programs)."
        )
    return (
        "the program ended, and no jitted function of it was large enough to be recorded; "
        "name one with --program, or give it the sizes of the real run."
    )


@contextmanager
def captured_block(target: Slice, program: str | None, found: list[Captured]) -> Generator[None]:
    """Record the large programs of a block; the capture is appended to `found` at its end.

    Raises:
        CaptureError: Nothing was recorded in the block.
    """
    with temporary_folder("tpukit-capture-") as folder:
        settings = {**capture_settings(target, folder, program=program), "leave_by_exception": True}
        about = {"format": FORMAT, "on": str(target), "command": sys.argv, "state": settings}
        (folder / SETTINGS).write_text(json.dumps(about), encoding="utf-8")
        with _prepared(settings) as reached, suppress(reached):
            yield
        if not (folder / RESULT).exists():
            raise CaptureError(
                "nothing large was compiled in the block; call the training step in it, with the "
                "sizes of the real run."
            )
        refuse_failure(json.loads((folder / RESULT).read_text(encoding="utf-8"))["failure"])
        found.append(read_capture(folder))


@contextmanager
def _prepared(settings: Mapping[str, Any]) -> Generator[type[BaseException]]:
    """Prepare this process like a captured one, and restore everything afterwards."""
    import jax
    from jax.extend.backend import clear_backends

    sys.path.insert(0, str(SHIM))
    try:
        from tpukit_shim import settings as shim_settings  # pyright: ignore
        from tpukit_shim import start  # pyright: ignore
    finally:
        sys.path.remove(str(SHIM))
    kept = ("jax_platforms", "jax_num_cpu_devices")
    before = {name: getattr(jax.config, name) for name in kept if hasattr(jax.config, name)}
    jax.clear_caches()
    clear_backends()
    recorder = start.start_capture(shim_settings.CaptureState(**settings))
    try:
        yield start.StepReached
        start.finish_block(recorder)
    finally:
        start.end_capture()
        clear_backends()
        for name, value in before.items():
            jax.config.update(name, value)
