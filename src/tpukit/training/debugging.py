"""jax's errors in a step, explained; and debugging mode, which checks every value.

In debugging mode there is no jit, and jax checks each operation's result for NaN. Its check for Inf
would fail on good steps, because `jnp.max` begins with -inf, and so does every softmax. So only the
results of a step are checked for Inf; an Inf that does harm before that has become a NaN.
"""

import logging
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ..annotations import PyTree
from ..errors import OUT_OF_MEMORY_ADVICE, TPUDistributedError, TPUOutOfMemoryError, XLARuntimeError
from ..parallel.sharding.trees import join_path

_PEER_LOST = ("Gloo", "Connection closed by peer", "Connection reset by peer", "coordination")


def is_debugging() -> bool:
    """Return whether `config.enable_debugging_mode()` is on."""
    return bool(jax.config.jax_disable_jit)  # pyright: ignore[reportAttributeAccessIssue]  made at run time


@contextmanager
def only_nans_inside() -> Generator[None]:
    """Allow Inf as a result of operations in the block; a NaN still raises."""
    with jax.debug_infs(False):
        yield


def refuse_infs(tree: PyTree, *, name: str) -> None:
    """Check a tree of arrays for Inf.

    Raises:
        FloatingPointError: A leaf contains an Inf; the message names the leaf.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        # On the host, because jax would blame an operation here for the Inf.
        parts = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and any(np.isinf(part).any() for part in parts):
            raise FloatingPointError(f"invalid value (inf) in {name} {join_path(path)}".rstrip())


def place_of(error: BaseException) -> str | None:
    """Return the last line of code outside jax in an error's traceback."""
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
    """Write jax's log of compiles to a file: without jit every operation is compiled."""
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
        TPUOutOfMemoryError: The devices do not have enough memory.
        TPUDistributedError: Another process has ended.
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
                f"{what} does not fit: {first}; {OUT_OF_MEMORY_ADVICE}. `tpukit check` lists the "
                "largest buffers."
            ) from error
        if any(sign in first for sign in _PEER_LOST):
            raise TPUDistributedError(
                f"{what}: another process has ended ({first}). Start all of them again; training "
                "resumes from the newest checkpoint."
            ) from error
        raise XLARuntimeError(f"{what} failed: {first}") from error
