"""Arrays without memory: all of them are views of the same untouched addresses.

The operating system allocates a page when it is first written, and nothing writes here, so hundreds
of gigabytes of parameters take no memory. Their values read as zeros.
"""
# The parts of jax that every program passes through have no public names.
# pyright: reportPrivateUsage=false

import mmap
import weakref
from math import prod
from typing import Any

from .settings import SMALL_BYTES, CaptureState, user_line

_ADDRESSES = 2**43
_window: Any = None
_made: dict[Any, Any] = {}
_recorded_ids: dict[int, Any] = {}
_derived: dict[int, Any] = {}


def zeros(shape: Any, dtype: Any) -> Any:
    """Return a numpy array of zeros that takes no memory."""
    import numpy as np

    global _window
    if _window is None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        _window = np.frombuffer(mmap.mmap(-1, _ADDRESSES, flags=flags), np.uint8)
    return _window[: prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def recorded_array(aval: Any, sharding: Any, committed: bool = True) -> Any:
    """Return an array of a shape, type and sharding that takes no memory.

    Arrays of one kind share their parts, which would be many on a large slice.
    """
    import jax
    from jax._src import array, core
    from jax._src.interpreters import pxla

    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):  # typed random keys
        from jax._src.sharding_impls import physical_sharding

        data = recorded_array(
            core.physical_aval(aval), physical_sharding(aval, sharding), committed
        )
        return jax.random.wrap_key_data(data, impl=aval.dtype._impl.name)
    key = (tuple(aval.shape), str(aval.dtype), bool(aval.weak_type), sharding, committed)
    if key not in _made:
        devices = sharding._addressable_device_assignment
        parts = [zeros(sharding.shard_shape(aval.shape), aval.dtype)] * len(devices)
        plain = core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
        first = _put(pxla)(plain, sharding, parts, devices, committed)
        _made[key] = first.aval, first._arrays
    aval, shared = _made[key]
    made = array.ArrayImpl(aval, sharding, shared, committed, _skip_checks=True)
    _remember(made, _recorded_ids)
    return made


def _remember(array: Any, ids: dict[int, Any]) -> None:
    """Keep an array's id for as long as the array is alive."""
    at = id(array)
    ids[at] = weakref.ref(array, lambda _: ids.pop(at, None))


def is_recorded(array: Any) -> bool:
    """Return whether an array has no memory."""
    return id(array) in _recorded_ids


def mark_derived(results: Any, args: Any) -> None:
    """Mark the results of a program that really ran, but on values without content."""
    if any(is_recorded(arg) or id(arg) in _derived for arg in args):
        for array in results:
            _remember(array, _derived)


def forget_arrays() -> None:
    """Drop every recorded array."""
    _made.clear()
    _recorded_ids.clear()
    _derived.clear()


def record_reads(capture: CaptureState) -> None:
    """Record each line of the program that reads a value without content, and make no copy.

    Large transfers to devices return recorded arrays too: a slice keeps its arrays on the devices,
    but here every copy would be in the memory of one machine.
    """
    from jax._src import array
    from jax._src.interpreters import pxla

    from .settings import replace

    implementation = array.ArrayImpl
    value = implementation._value
    truth = implementation.__bool__

    def read(self: Any) -> Any:
        if is_recorded(self) or id(self) in _derived:
            capture.reads.setdefault(user_line(), "read")
        return zeros(self.shape, self.dtype) if is_recorded(self) else value.fget(self)

    def branch(self: Any) -> bool:
        if is_recorded(self) or id(self) in _derived:
            capture.reads[user_line()] = "decided"
        return truth(self)

    replace(implementation, "_value", property(read))
    replace(implementation, "__bool__", branch)
    put = _put(pxla)

    def batched_device_put(
        aval: Any,
        sharding: Any,
        xs: Any,
        devices: Any,
        committed: bool = True,
        *rest: Any,
        **how: Any,
    ) -> Any:
        size = prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize * len(devices)
        if size <= SMALL_BYTES or len(devices) != sharding.num_devices:
            return put(aval, sharding, xs, devices, committed, *rest, **how)
        return recorded_array(aval, sharding, committed)

    batched_device_put.original = put  # type: ignore[attr-defined]
    replace(pxla, "batched_device_put", batched_device_put)


def _put(pxla: Any) -> Any:
    """Return jax's own function that puts parts of an array on devices."""
    return getattr(pxla.batched_device_put, "original", pxla.batched_device_put)
