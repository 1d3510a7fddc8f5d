"""What jax raises while a step compiles or runs, as an error that says what to do."""

from collections.abc import Generator
from contextlib import contextmanager

import jax

from ..errors import TPUDistributedError, TPUOutOfMemoryError, XLARuntimeError
from .debugging import place_of

_PEER_LOST = ("Gloo", "Connection closed by peer", "Connection reset by peer", "coordination")


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
