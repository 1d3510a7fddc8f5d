"""Capture a program of this very process: jax prepared for a block, and put back at its end.

A notebook or a test has jax imported already, so the block starts jax's CPU backend again with the
devices of the slice. Arrays that were made before the block belong to the old backend and cannot be
used inside it.
"""

import json
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import CaptureError
from ..hardware import Slice
from ..runtime.files import temporary_folder
from .captured import FORMAT, RESULT, SETTINGS, Captured, read_capture
from .running import SHIM, capture_settings, refuse_failure


@contextmanager
def captured_block(target: Slice, program: str | None, found: list[Captured]) -> Generator[None]:
    """Record the large programs of a block; `found` gets the capture when the block ends.

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
    """Prepare this process as a captured one is, and put everything back afterwards."""
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
