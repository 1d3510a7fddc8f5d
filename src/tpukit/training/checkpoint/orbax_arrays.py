"""Named arrays to and from disk or bucket, through Orbax."""

import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding

from ...parallel.rebalancing.reshard import move
from ...step.host_memory import READ_AT_ONCE_BYTES, WORTH_CUTTING_BYTES, read_limit_bytes
from .agreement import SaveMeetings
from .named_arrays import KEY, LeafShape, key_implementation, restored_leaf

logger = logging.getLogger(__name__)

# How long other processes may take to write their part before Orbax gives up on the save.
WRITE_TIMEOUT_S = 1200


class OrbaxArrays:
    """Writes and reads the arrays of one checkpoint: a folder for each item.

    Weights hardly compress, so they are written as they are: zstd would cost seconds of every
    core for a few percent.

    Args:
        read_at_once_bytes: What may be under way from storage to the devices at any time.

    Attributes:
        meetings: Where the processes that write one checkpoint wait for each other.
    """

    def __init__(self, *, read_at_once_bytes: int = READ_AT_ONCE_BYTES) -> None:
        _hide_orbax_traces()
        self._read_at_once = read_at_once_bytes
        self.meetings = SaveMeetings()
        options = ocp.options.AsyncOptions(
            timeout_secs=WRITE_TIMEOUT_S, barrier_sync_fn=self.meetings.meet
        )
        self._checkpointer = ocp.AsyncCheckpointer(_handler(), async_options=options)

    def start_save(self, folder: epath.Path, items: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy the arrays off the devices and begin to write them; `wait()` ends it."""
        # Orbax writes nothing for an empty item, and refuses it.
        filled = {name: dict(arrays) for name, arrays in items.items() if arrays}
        if not filled:
            folder.mkdir(parents=True, exist_ok=True)
            return
        # In chunks as large as their shards: smaller ones would be copied once more to be written.
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

        Of an item, only the arrays that are asked for. They pass through host memory a few at a
        time, whatever the size of the checkpoint.
        """
        largest = max((shape.n_bytes for shapes in items.values() for shape in shapes), default=0)
        arguments: dict[str, Any] = {}
        for item, shapes in items.items():
            wanted = {
                shape.name: _how(shape, shardings[item].get(shape.name))
                for shape in shapes
                if not shape.is_empty
            }
            if wanted:
                arguments[item] = ocp.args.PyTreeRestore(
                    item=dict.fromkeys(wanted, 0), restore_args=wanted, partial_restore=True
                )
        found: Any = {}
        if arguments:
            limit = read_limit_bytes(largest, self._read_at_once)
            with ocp.Checkpointer(_handler(limit_bytes=limit)) as reader:
                found = reader.restore(folder, args=ocp.args.Composite(**arguments))
        return {
            item: {
                shape.name: _empty(shape, shardings[item].get(shape.name))
                if shape.is_empty
                else _placed(shape, found[item][shape.name], shardings[item].get(shape.name))
                for shape in shapes
            }
            for item, shapes in items.items()
        }

    def close(self) -> None:
        """Finish what is being written and stop Orbax's threads."""
        self._checkpointer.close()


def _handler(*, limit_bytes: int | None = None) -> ocp.CompositeCheckpointHandler:
    """What knows how items are stored; it reads no more than so many bytes at once."""
    gigabytes: Any = None if limit_bytes is None else limit_bytes / 10**9
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=WORTH_CUTTING_BYTES
    )
    # What is given to be written from host memory is a copy already.
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


def _how(shape: LeafShape, place: Sharding | None) -> ocp.RestoreArgs:
    # The words of a random key have one dimension more than the key's own sharding speaks of.
    if place is None or shape.kind == KEY:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array,
        sharding=place,
        global_shape=shape.shape,
        dtype=jnp.dtype(shape.dtype),
    )


def _placed(shape: LeafShape, value: Any, place: Sharding | None) -> Any:
    leaf = restored_leaf(shape, value)
    return move(leaf, place) if shape.kind == KEY else leaf


def _empty(shape: LeafShape, place: Sharding | None) -> Any:
    if shape.kind == KEY:
        words = jax.random.key_data(jax.random.key(0, impl=key_implementation(shape.dtype)))
        return move(restored_leaf(shape, np.zeros((*shape.shape, *words.shape), np.uint32)), place)
    return move(np.zeros(shape.shape, jnp.dtype(shape.dtype)), place)


@functools.cache
def _hide_orbax_traces() -> None:
    """Keep Orbax from printing pages of stacks for a failure that is raised as one sentence."""

    def is_news(record: logging.LogRecord) -> bool:
        is_trace = record.exc_info is not None and "orbax" in record.pathname
        return not is_trace or logger.isEnabledFor(logging.DEBUG)

    logging.getLogger("absl").addFilter(is_news)
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Orbax closes its loop at the first array that fails. TensorStore's threads then report
        # the other arrays to a closed loop, straight from C++.
        from_outside = trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
        if not (from_outside and str(error) == "Event loop is closed"):
            before(kind, error, trace)

    sys.excepthook = show
