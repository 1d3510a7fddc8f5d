"""What goes wrong inside a step: jax's errors explained, and debugging mode, which checks values.

In debugging mode there is no jit, and jax checks each operation's result for NaN. Its own check for
Inf cannot be used on a whole step: `jnp.max` begins with -inf, and so does every softmax. So Inf is
looked for in what a step leaves behind, by name; one that spoils anything on the way there has
become a NaN.
"""

import logging
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import TPUDistributedError, TPUOutOfMemoryError, XLARuntimeError
from ..parallel.sharding.trees import join_path

_PEER_LOST = ("Gloo", "Connection closed by peer", "Connection reset by peer", "coordination")


def is_debugging() -> bool:
    """Whether `config.enable_debugging_mode()` is on."""
    return bool(jax.config.jax_disable_jit)  # pyright: ignore[reportAttributeAccessIssue]  made at run time


@contextmanager
def only_nans_inside() -> Generator[None]:
    """Let operations inside the block make an Inf; a NaN still raises."""
    with jax.debug_infs(False):
        yield


def refuse_infs(tree: Any, *, name: str) -> None:
    """Name the first leaf that holds an Inf.

    Raises:
        FloatingPointError: One does.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        # On the host: an operation that meets an Inf here would be the one that is blamed.
        parts = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and any(np.isinf(part).any() for part in parts):
            raise FloatingPointError(f"invalid value (inf) in {name} {join_path(path)}".rstrip())


def place_of(error: BaseException) -> str | None:
    """The last line of code before jax's own that an error came through."""
    inside = f"{Path(jax.__file__).parent}/"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(inside) and frame.filename != __file__
    ]
    if not frames:
        return None
    last = frames[-1]
    return f"{last.filename}:{last.lineno} ({last.line})"


@contextmanager
def compile_log(path: Path) -> Generator[None]:
    """Keep jax's log of compiles in a file: without jit every operation is one, on the terminal."""
    logger = logging.getLogger("jax")
    before = logger.propagate, logger.handlers[:]
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger.propagate, logger.handlers[:] = False, [handler]
    try:
        yield
    finally:
        logger.propagate, logger.handlers[:] = before
        handler.close()


@contextmanager
def explained(what: str) -> Generator[None]:
    """Turn jax's errors inside the block into tpukit's.

    Raises:
        TPUOutOfMemoryError: The devices have not enough memory.
        TPUDistributedError: Another process is gone.
        XLARuntimeError: A NaN or Inf was found (debugging mode), or the program failed.
    """
    try:
        yield
    except FloatingPointError as error:
        first = str(error).strip().splitlines()[0]
        place = place_of(error)
        at = "" if place is None else f", at {place}"
        raise XLARuntimeError(
            f"{what}: {first}{at}. Without enable_debugging_mode() the run would go on to a NaN "
            "loss."
        ) from error
    except jax.errors.JaxRuntimeError as error:
        first = str(error).strip().splitlines()[0]
        if "RESOURCE_EXHAUSTED" in first:
            raise TPUOutOfMemoryError(
                f"{what} does not fit: {first}. Use a smaller batch, more microbatches or "
                "remat='full'; `tpukit check` says what takes the memory."
            ) from error
        if any(sign in first for sign in _PEER_LOST):
            raise TPUDistributedError(
                f"{what}: another process is gone ({first}). Start all of them again; training "
                "goes on from the newest checkpoint."
            ) from error
        raise XLARuntimeError(f"{what} failed: {first}") from error
