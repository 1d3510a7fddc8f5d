"""Make the CPU devices answer like the devices of a slice, as seen from one of its hosts.

A program that asks for platform, kind, coordinates, memory and processes gets the slice's answers.
jax itself asks the client for its platform when it compiles. The client is left unchanged, so small
programs still compile and run on the CPU. All devices stay addressable, so that jax can make arrays
over all of them in one process; only the program's view is split by hosts.
"""
# The parts of jax that every program passes through have no public names.
# pyright: reportPrivateUsage=false

import re
from math import prod
from typing import Any

from .arrays import is_recorded, recorded_array
from .settings import CaptureState, replace

_VALUE_BYTES = 2**20
"""An array of per-host data with at most this many bytes has its values."""


def disguise_as_slice(capture: CaptureState) -> None:
    """Replace jax's answers by the slice's; needs jax imported and no backend started."""
    import jax
    from jax._src import xla_bridge

    update = jax.config.update
    if hasattr(jax.config, "jax_num_cpu_devices"):
        update("jax_num_cpu_devices", len(capture.devices))
    update("jax_platforms", "cpu")
    if len(xla_bridge.devices()) != len(capture.devices):
        capture.note(
            f"jax has {len(xla_bridge.devices())} devices instead of {len(capture.devices)}: "
            "another part of the program started it first."
        )
    _disguise_devices(capture)
    backend_of = xla_bridge._get_backend_uncached
    replace(
        xla_bridge,
        "_get_backend_uncached",
        lambda platform=None: backend_of("cpu" if platform == "tpu" else platform),
    )
    for module in (jax, xla_bridge, getattr(getattr(jax, "extend", None), "backend", None)):
        if module is not None:
            replace(module, "default_backend", lambda: "tpu")
    ours = (
        *("jax_platforms", "jax_platform_name", "jax_num_cpu_devices"),
        *("jax_compilation_cache_dir", "jax_cpu_collectives_implementation"),
    )
    replace(
        jax.config,
        "update",
        lambda name, value: None if name in ours else update(name, value),
    )
    _disguise_processes(capture)


def _disguise_devices(capture: CaptureState) -> None:
    from jaxlib import xla_client

    places = capture.devices
    device = xla_client.Device
    answers = {
        "platform": property(lambda self: "tpu"),
        "device_kind": property(lambda self: capture.kind),
        "coords": property(lambda self: tuple(places[self.id]["coords"])),
        "core_on_chip": property(lambda self: places[self.id]["core"]),
        "slice_index": property(lambda self: places[self.id]["slice"]),
        "process_index": property(lambda self: places[self.id]["process"]),
        "num_cores": property(lambda self: 1),
        "memory_stats": lambda self: {
            "bytes_limit": capture.hbm_bytes,
            "bytes_in_use": 0,
            "peak_bytes_in_use": 0,
        },
    }
    for name, answer in answers.items():
        replace(device, name, answer)


def _disguise_processes(capture: CaptureState) -> None:
    """Answer as process 0 of the slice's hosts, and on behalf of the others."""
    import jax
    from jax._src import array, distributed, sharding_impls, xla_bridge

    count = capture.processes
    replace(jax, "process_count", lambda backend=None: count)
    replace(xla_bridge, "process_count", lambda backend=None: 1)
    replace(jax, "local_device_count", lambda backend=None: len(jax.local_devices()))
    replace(jax.distributed, "initialize", lambda *args, **kwargs: None)
    replace(jax.distributed, "shutdown", lambda: None)
    replace(
        sharding_impls.SingleDeviceSharding, "is_fully_addressable", property(lambda self: True)
    )
    if hasattr(jax.distributed, "is_initialized"):
        replace(jax.distributed, "is_initialized", lambda: count > 1)
    if count == 1:
        return
    replace(distributed.global_state, "client", _Peers(count))
    replace(distributed.global_state, "num_processes", count)
    replace(distributed.global_state, "process_id", 0)
    single = array.make_array_from_single_device_arrays

    def from_single_device_arrays(
        shape: Any, sharding: Any, arrays: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if len(arrays) == sharding.num_devices:
            return single(shape, sharding, arrays, *args, **kwargs)
        return recorded_array(_aval(shape, arrays[0].dtype), sharding)

    def from_process_local_data(sharding: Any, local_data: Any, global_shape: Any = None) -> Any:
        shardings = jax.tree.map(lambda _: sharding, local_data) if _is_leaf(sharding) else sharding
        if global_shape is None:
            return jax.tree.map(_from_local, local_data, shardings)
        shapes = jax.tree.map(lambda _: global_shape, local_data)
        shapes = shapes if isinstance(global_shape, tuple) else global_shape
        leaves, tree = jax.tree.flatten(local_data)
        wanted = jax.tree.leaves(shapes, is_leaf=lambda one: isinstance(one, tuple))
        placed = jax.tree.leaves(shardings, is_leaf=_is_leaf)
        made = [
            _global_array(leaf, shape, one)
            for leaf, shape, one in zip(leaves, wanted, placed, strict=True)
        ]
        return jax.tree.unflatten(tree, made)

    for module in (jax, array):
        replace(module, "make_array_from_single_device_arrays", from_single_device_arrays)
        replace(module, "make_array_from_process_local_data", from_process_local_data)
    _disguise_multihost_utils(count)


def _disguise_multihost_utils(count: int) -> None:
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    def gathered(tree: Any, tiled: bool = False) -> Any:
        join = np.concatenate if tiled else np.stack
        return jax.tree.map(lambda leaf: join([np.asarray(leaf)] * count), tree)

    def to_global(local_inputs: Any, global_mesh: Any, pspecs: Any) -> Any:
        return jax.tree.map(
            lambda leaf, spec: _from_local(leaf, jax.sharding.NamedSharding(global_mesh, spec)),
            local_inputs,
            _broadcast_specs(pspecs, local_inputs),
        )

    def to_local(global_inputs: Any, global_mesh: Any, pspecs: Any) -> Any:
        return jax.tree.map(_host_part, global_inputs)

    replace(multihost_utils, "process_allgather", gathered)
    replace(multihost_utils, "broadcast_one_to_all", lambda tree, is_source=None: tree)
    replace(multihost_utils, "sync_global_devices", lambda name: None)
    replace(multihost_utils, "assert_equal", lambda tree, fail_message="": None)
    replace(multihost_utils, "host_local_array_to_global_array", to_global)
    replace(multihost_utils, "global_array_to_host_local_array", to_local)


class _Peers:
    """A coordination service in which all other processes always agree."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.values: dict[str, Any] = {}

    def wait_at_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Return at once: no other process is awaited."""

    def key_value_set(self, key: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Store a value."""
        self.values[key] = value

    key_value_set_bytes = key_value_set

    def blocking_key_value_get(self, key: str, timeout_in_ms: int = 0) -> Any:
        """Return a value that this process set, or that a process like it would have set.

        The keys of several processes differ by the process number at their end.
        """
        for known in (key, re.sub(r"\d+$", "0", key)):
            if known in self.values:
                return self.values[known]
        raise RuntimeError(f"DEADLINE_EXCEEDED: no process of the capture sets {key!r}.")

    blocking_key_value_get_bytes = key_value_try_get = blocking_key_value_get

    def key_value_delete(self, key: str) -> None:
        """Remove a value."""
        self.values.pop(key, None)

    def key_value_dir_get(self, key: str) -> list[Any]:
        """Return the values below a prefix."""
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    key_value_dir_get_bytes = key_value_dir_get

    def get_live_nodes(self, nodes: Any) -> Any:
        """Return every process of the request."""
        return nodes


def _is_leaf(value: Any) -> bool:
    return hasattr(value, "shard_shape")


def _aval(shape: Any, dtype: Any) -> Any:
    import jax
    import numpy as np
    from jax._src import core

    return core.ShapedArray(tuple(shape), jax.dtypes.canonicalize_dtype(np.dtype(dtype)))


def _broadcast_specs(specs: Any, tree: Any) -> Any:
    import jax

    if isinstance(specs, jax.sharding.PartitionSpec):
        return jax.tree.map(lambda _: specs, tree)
    return specs


def _from_local(leaf: Any, sharding: Any) -> Any:
    """Return the global array of which each host gives a part like `leaf`."""
    shape = tuple(
        size * _hosts_along(sharding, axis, len(leaf.shape)) for axis, size in enumerate(leaf.shape)
    )
    return _global_array(leaf, shape, sharding)


def _global_array(leaf: Any, shape: Any, sharding: Any) -> Any:
    """Return a global array with this host's part `leaf` and zeros on other hosts.

    A small array gets its real values, because programs use them to agree: a status that is summed
    over all hosts must arrive.
    """
    import jax
    import numpy as np

    if is_recorded(leaf) or prod(shape) * leaf.dtype.itemsize > _VALUE_BYTES:
        return recorded_array(_aval(shape, leaf.dtype), sharding)
    values = np.zeros(shape, leaf.dtype)
    values[_host_block(sharding, shape, leaf.shape)] = leaf
    return jax.device_put(values, sharding)


def _host_block(sharding: Any, shape: Any, part: Any) -> tuple[slice, ...]:
    """Return where the part of host 0, with the shape `part`, begins and ends in an array."""
    places = sharding.devices_indices_map(tuple(shape)).items()
    own = [index for device, index in places if device.process_index == 0]
    block = []
    for axis, (whole, size) in enumerate(zip(shape, part, strict=True)):
        start = min((index[axis].start or 0 for index in own), default=0)
        start = min(start, max(whole - size, 0))
        block.append(slice(start, start + size))
    return tuple(block)


def _hosts_along(sharding: Any, axis: int, rank: int) -> int:
    """Return how many different parts the hosts together keep along one axis of an array."""
    parts = {}
    shape = tuple(sharding.num_devices for _ in range(rank))
    for device, index in sharding.devices_indices_map(shape).items():
        start = index[axis].start or 0
        parts.setdefault(device.process_index, set()).add(start)
    return len({frozenset(part) for part in parts.values()})


def _host_part(leaf: Any) -> Any:
    """Return this host's part of a global array."""
    import jax
    import numpy as np

    shape = tuple(
        size // _hosts_along(leaf.sharding, axis, leaf.ndim) for axis, size in enumerate(leaf.shape)
    )
    if is_recorded(leaf):
        return jax.numpy.zeros(shape, leaf.dtype)
    return jax.numpy.asarray(np.asarray(leaf)[_host_block(leaf.sharding, leaf.shape, shape)])
