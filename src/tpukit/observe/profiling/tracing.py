"""One trace at a time: started, marked, and ended whatever happens inside."""

import inspect
import re
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import TPUValidationError
from ...records.hooks import PROFILE_MARK, profile_marks
from .recording import BARRIER

_ODD = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 60
_lock = threading.Lock()
_recorded_now: list[str] = []


@contextmanager
def only_one(name: str) -> Generator[None]:
    """Hold the one profile that a process can record.

    Raises:
        TPUValidationError: Another one is being recorded, in this thread or another.
    """
    with _lock:
        if _recorded_now:
            raise TPUValidationError(
                f"the profile '{name}' cannot begin: '{_recorded_now[0]}' is being recorded, and a "
                "process records one at a time; end that block first."
            )
        _recorded_now.append(name)
    try:
        yield
    finally:
        with _lock:
            _recorded_now.remove(name)


@contextmanager
def trace(folder: Path, name: str, *, python_calls: bool) -> Generator[None]:
    """Record what devices and host do in the block into `folder`, as jax lays it out.

    The trace ends when all that was put on its way in the block is through; after an error at
    once.

    Raises:
        TPUValidationError: Somebody else's trace is being recorded, or it cannot be written.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 1 if python_calls else 0
    if hasattr(options, "session_id"):
        # jax names sessions by the second, so that the second of two within one replaces the first.
        options.session_id = f"{time.strftime('%Y_%m_%d_%H_%M_%S')}_{time.time_ns() % 10**9:09d}"
    wait_for_devices = _barrier(tuple(jax.local_devices()))
    marks = profile_marks(name, caller=_caller())
    try:
        jax.profiler.start_trace(str(folder), profiler_options=options)
    except RuntimeError as error:
        raise TPUValidationError(
            f"the profile '{name}' cannot begin ({error}); end the other trace of this process "
            "first (jax.profiler.stop_trace)."
        ) from None
    try:
        with jax.profiler.TraceAnnotation(PROFILE_MARK, **marks):
            yield
            wait_for_devices()
    finally:
        _stop(folder, name)


@lru_cache(maxsize=1)
def _barrier(devices: tuple[Any, ...]) -> Callable[[], None]:
    """Return what waits until the devices are through with all that was put on their way.

    A result that nobody keeps cannot be waited for, but a device takes programs in order: one more,
    which does nothing, ends after them. The CPU's devices keep that order only among programs of
    one device and among programs with collectives, so there it takes one of each. They are compiled
    before the trace begins, so that no compiling is recorded.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    def add_one(x: jax.Array) -> jax.Array:
        return x + 1

    def add_up(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "all")

    add_one.__name__ = add_up.__name__ = BARRIER
    alone = jax.jit(add_one)
    starts = [jax.device_put(0, device) for device in devices]
    last: list[Callable[[], jax.Array]] = [partial(alone, start) for start in starts]
    if devices[0].platform == "cpu" and len(devices) > 1:
        mesh, split = Mesh(devices, ("all",)), PartitionSpec("all")
        together = jax.jit(
            jax.shard_map(add_up, mesh=mesh, in_specs=split, out_specs=PartitionSpec())
        )
        whole = jax.device_put(np.zeros(len(devices)), NamedSharding(mesh, split))
        last.append(partial(together, whole))
    jax.block_until_ready([program() for program in last])

    def wait() -> None:
        for one in jax.live_arrays():
            try:
                one.block_until_ready()
            except RuntimeError:
                if not one.is_deleted():  # another thread may give it away meanwhile
                    raise
        jax.block_until_ready([program() for program in last])

    return wait


def _stop(folder: Path, name: str) -> None:
    import jax

    try:
        jax.profiler.stop_trace()
    except (RuntimeError, OSError) as error:
        raise TPUValidationError(
            f"the profile '{name}' could not be written to {folder} ({error}); choose a folder "
            "with room that can be written."
        ) from error


def folder_of(name: str) -> str:
    """A folder's name for any name: its plain letters, with a digest where others were left out."""
    plain = _ODD.sub("_", name).strip("._")[:_LONGEST_NAME]
    if plain == name:
        return plain
    return f"{plain or 'profile'}-{sha256(name.encode(errors='replace')).hexdigest()[:8]}"


def _caller() -> str:
    """The line of the user's code that opened the block: the first outside of this package."""
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("tpukit", "contextlib"):
            file = Path(frame.f_code.co_filename).name
            return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
