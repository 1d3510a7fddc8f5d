"""The generation that a program is traced for, which decides how a kernel is split into blocks.

A program for a TPU is often traced on a machine without one, so a kernel cannot ask the device.
Code that compiles sets the generation with `target_chip`; kernels read `current_target`.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from .catalog import get_chip


@contextmanager
def target_chip(name: str) -> Generator[None]:
    """Trace everything inside for the generation called `name`."""
    with _context()(get_chip(name).name):
        yield


def current_target() -> str | None:
    """Return the generation set by `target_chip`, else the local TPU's, else None."""
    stated = _context().value if "jax" in sys.modules else None
    return stated or _local_chip()


@cache
def _context() -> Any:
    """Return a context value in the keys of jax's caches, so each target has its own trace."""
    import jax

    return jax.make_user_context(None)


def on_one_gpu() -> bool:
    """Whether a program traced now will run on an NVIDIA GPU that is the only device."""
    import jax

    return current_target() is None and jax.default_backend() == "gpu" and jax.device_count() == 1


def _local_chip() -> str | None:
    """Return the generation of this process's TPU; this starts jax's backend."""
    jax = sys.modules.get("jax")
    if jax is None or jax.default_backend() != "tpu":
        return None
    return get_chip(jax.devices()[0].device_kind).name
