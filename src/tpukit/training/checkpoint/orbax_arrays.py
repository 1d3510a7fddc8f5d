"""Writing and reading named arrays on disk or in a bucket, through Orbax."""

import functools
import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding, SingleDeviceSharding

from ...annotations import Device, PyTree
from ...parallel.rebalancing import move
from ...step.host_memory import READ_AT_ONCE_BYTES, WORTH_CUTTING_BYTES, read_limit_bytes
from .agreement import SaveBarriers
from .named_arrays import KEY, LeafShape, key_implementation, restored_leaf

logger = logging.getLogger(__name__)

# How long other processes may take to write their part before Orbax fails the save.
WRITE_TIMEOUT_S = 1200
PINNED = "pinned_host"


class OrbaxArrays:
    """Writes and reads the arrays of one checkpoint, one folder per item.

    Weights hardly compress, so they are written without compression: zstd would take seconds on
    every core and save a few percent.

    Args:
        read_at_once_bytes: How much may be in host memory between storage and devices.

    Attributes:
        barriers: Barriers of the processes that write one checkpoint.
    """

    def __init__(self, *, read_at_once_bytes: int = READ_AT_ONCE_BYTES) -> None:
        _hide_orbax_traces()
        self._read_at_once = read_at_once_bytes
        self.barriers = SaveBarriers()
        options = ocp.options.AsyncOptions(
            timeout_secs=WRITE_TIMEOUT_S, barrier_sync_fn=self.barriers.wait
        )
        self._checkpointer = ocp.AsyncCheckpointer(_handler(), async_options=options)

    def start_save(self, folder: epath.Path, items: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy the arrays from the devices and begin to write; `wait()` completes the write."""
        # Orbax writes nothing for an empty item, and refuses it.
        filled = {name: dict(arrays) for name, arrays in items.items() if arrays}
        if not filled:
            folder.mkdir(parents=True, exist_ok=True)
            return
        # In chunks as large as their shards, because smaller ones need another copy.
        arguments = {name: ocp.args.PyTreeSave(arrays) for name, arrays in filled.items()}
        self._checkpointer.save(folder, args=ocp.args.Composite(**arguments))

    def wait(self) -> None:
        """Return when every process's arrays are written and Orbax has committed them."""
        self._checkpointer.wait_until_finished()

    def load(
        self,
        folder: epath.Path,
        items: Mapping[str, Sequence[LeafShape]],
        shardings: Mapping[str, Mapping[str, Sharding | None]],
    ) -> dict[str, dict[str, Any]]:
        """Read items onto their shardings; an array without one is read to host memory.

        Only the arrays in `items` are read. They pass through host memory a few at a time, so
        the size of the checkpoint does not matter.
        """
        largest = max((shape.n_bytes for shapes in items.values() for shape in shapes), default=0)
        arguments: dict[str, Any] = {}
        for item, shapes in items.items():
            wanted = {
                shape.name: _restore_arguments(shape, shardings[item].get(shape.name))
                for shape in shapes
                if not shape.is_empty
            }
            if wanted:
                arguments[item] = ocp.args.PyTreeRestore(
                    item=dict.fromkeys(wanted, 0), restore_args=wanted, partial_restore=True
                )
        arrays: Any = {}
        if arguments:
            limit = read_limit_bytes(largest, self._read_at_once)
            with ocp.Checkpointer(_handler(limit_bytes=limit)) as reader:
                arrays = reader.restore(folder, args=ocp.args.Composite(**arguments))
        return {
            item: {
                shape.name: _empty(shape, shardings[item].get(shape.name))
                if shape.is_empty
                else _placed(shape, arrays[item][shape.name], shardings[item].get(shape.name))
                for shape in shapes
            }
            for item, shapes in items.items()
        }

    def close(self) -> None:
        """Finish what is being written and stop Orbax's threads."""
        self._checkpointer.close()


def _handler(*, limit_bytes: int | None = None) -> ocp.CompositeCheckpointHandler:
    """Return Orbax's handler of items; it reads at most `limit_bytes` at once."""
    gigabytes: Any = None if limit_bytes is None else limit_bytes / 10**9
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=WORTH_CUTTING_BYTES
    )
    # Arrays in host memory are copies already.
    numbers = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    handler = ocp.PyTreeCheckpointHandler(
        use_compression=False,
        use_zarr3=True,
        restore_concurrent_gb=gigabytes,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (np.ndarray, numbers)
        ),
    )
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(None, ocp.args.PyTreeSave, handler)
    registry.add(None, ocp.args.PyTreeRestore, handler)
    return ocp.CompositeCheckpointHandler(handler_registry=registry)


def _restore_arguments(shape: LeafShape, sharding: Sharding | None) -> ocp.RestoreArgs:
    # The data of a random key have one dimension more than the sharding of the key.
    if sharding is None or shape.kind == KEY:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array,
        sharding=sharding,
        global_shape=shape.shape,
        dtype=jnp.dtype(shape.dtype),
    )


def _placed(shape: LeafShape, value: Any, sharding: Sharding | None) -> Any:
    leaf = restored_leaf(shape, value)
    return move(leaf, sharding) if shape.kind == KEY else leaf


def _empty(shape: LeafShape, sharding: Sharding | None) -> Any:
    if shape.kind == KEY:
        words = jax.random.key_data(jax.random.key(0, impl=key_implementation(shape.dtype)))
        data = np.zeros((*shape.shape, *words.shape), np.uint32)
        return move(restored_leaf(shape, data), sharding)
    return move(np.zeros(shape.shape, jnp.dtype(shape.dtype)), sharding)


@functools.cache
def _hide_orbax_traces() -> None:
    """Keep Orbax from printing tracebacks of a failure that is raised as one sentence."""

    def is_shown(record: logging.LogRecord) -> bool:
        is_trace = record.exc_info is not None and "orbax" in record.pathname
        return not is_trace or logger.isEnabledFor(logging.DEBUG)

    logging.getLogger("absl").addFilter(is_shown)
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Orbax closes its event loop at the first array that fails. TensorStore's threads then
        # report the other arrays to the closed loop, directly from C++.
        from_outside = trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
        if not (from_outside and str(error) == "Event loop is closed"):
            before(kind, error, trace)

    sys.excepthook = show


class PinnedMemory:
    """Pins host memory for a GPU's first save, in a background thread.

    A GPU copies to pinned memory at the speed of its link, and pinning takes half a second per
    gigabyte. The allocator keeps pinned memory, so only the first save of a process waits for it:
    8 s for 13.7 GB on an H200, where later saves block for 0.3 s.

    Args:
        trees: Pytrees of arrays or `jax.ShapeDtypeStruct`s with shardings.
    """

    def __init__(self, trees: PyTree) -> None:
        self._pieces = _pieces(trees)
        self.n_bytes = sum(piece.nbytes for piece, _ in self._pieces)
        self._thread = threading.Thread(target=self._pin, name="tpukit-pinned-memory", daemon=True)
        self._thread.start()

    @staticmethod
    def is_wanted() -> bool:
        """Return whether saves copy to pinned memory here, as Orbax does on a GPU."""
        return jax.default_backend() == "gpu"

    def wait(self) -> None:
        """Return when the memory is pinned, or pinning has failed."""
        self._thread.join()

    def _pin(self) -> None:
        started = time.monotonic()
        try:
            pinned = [
                jax.device_put(piece, SingleDeviceSharding(device, memory_kind=PINNED))
                for piece, device in self._pieces
            ]
            jax.block_until_ready(pinned)
            self._pieces.clear()
        except (RuntimeError, ValueError) as error:
            # Not fatal: a save that lacks memory raises its own error.
            logger.info("Host memory for checkpoints could not be pinned: %s", error)
            return
        logger.info(
            "Pinned %.1f GB of host memory for checkpoints in %.1f s",
            self.n_bytes / 1e9,
            time.monotonic() - started,
        )


def _pieces(trees: PyTree) -> list[tuple[np.ndarray, Device]]:
    """Return the shards that a save copies from this process's devices, each shard once."""
    pieces: list[tuple[np.ndarray, Device]] = []
    for leaf in jax.tree.leaves(trees):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue  # a random key is a few bytes
        parts = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        shape = leaf.sharding.shard_shape(leaf.shape)
        devices = {str(index): device for device, index in parts.items()}.values()
        # Zeros take no memory until they are written, which they never are.
        pieces += [(np.zeros(shape, leaf.dtype), device) for device in devices]
    return pieces
