"""Which generation a program is being traced for, where that decides how a kernel is cut.

A program for a TPU is often traced on a machine that has none, so a kernel cannot ask the device.
Whoever compiles says it with `target_chip`; kernels ask `current_target`.
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
    """The generation traced for: the one stated, else the TPU that is here, else None."""
    stated = _context().value if "jax" in sys.modules else None
    return stated or _local_chip()


@cache
def _context() -> Any:
    """A value that jax counts among the keys of its caches: another target is another trace."""
    import jax

    return jax.make_user_context(None)


def on_one_gpu() -> bool:
    """Whether a program traced now will run on an NVIDIA GPU that is the only device."""
    import jax

    return current_target() is None and jax.default_backend() == "gpu" and jax.device_count() == 1


def _local_chip() -> str | None:
    """The TPU of this process. Asking starts jax's backend, as whatever is traced will too."""
    jax = sys.modules.get("jax")
    if jax is None or jax.default_backend() != "tpu":
        return None
    return get_chip(jax.devices()[0].device_kind).name
