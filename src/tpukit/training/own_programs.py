"""Compiled programs of every process on disk, so that none compiles again after a restart.

jax lets process 0 alone write to its compilation cache: on other platforms all processes have the
same key, and many writers of one file are trouble for some file systems. On CPUs each process has a
key of its own, so all but the first would compile anew at every restart.
"""

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import jax


@contextmanager
def keeping_own_programs() -> Generator[None]:
    """Let this process write what it compiles in the block to jax's cache, on CPUs."""
    if jax.default_backend() != "cpu" or jax.process_count() == 1:
        yield
        return
    # Not public; where it is not there, the others compile again, and nothing else changes.
    state: Any = getattr(import_module("jax._src.distributed"), "global_state", None)
    rank = getattr(state, "process_id", 0)
    if not rank:
        yield
        return
    state.process_id = 0
    try:
        yield
    finally:
        state.process_id = rank
