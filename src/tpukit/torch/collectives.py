"""Collectives over the processes of a job: agreed on first, so that no process waits for ever.

Before data moves, every process tells the others through jax's coordination service what it is
about to do (about 1.4 ms on loopback, measured). A process that asks for something else, or none at
all, is then an error on every process, where the exchange itself would hang.
"""

import functools
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import CommunicationTimeout, TPUDistributedError
from ..runtime.multihost import coordination_client

Reduction = Literal["sum", "mean", "max", "min"]
Values = np.ndarray[Any, Any]
_AXIS = "devices"
# One count a process, whoever asks: the processes of a job make the same calls in the same order.
_calls = itertools.count()
DEFAULT_TIMEOUT_S = 300.0  # that other processes are waited for


class Collectives:
    """Exchanges between one array a device, on the first device of every process or on all.

    Args:
        timeout_s: How long to wait for the other processes.
        every_device: Whether each local device takes part with an array of its own.
    """

    def __init__(self, timeout_s: float, *, every_device: bool) -> None:
        self.timeout_s = timeout_s
        first: dict[int, Any] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        chosen = jax.devices() if every_device else [first[rank] for rank in sorted(first)]
        self._mesh = Mesh(np.array(chosen), (_AXIS,))

    def reduce(self, arrays: Sequence[Values], how: Reduction) -> Values:
        """Return sum, mean, maximum or minimum over all devices' arrays, of their own format."""
        return self._run(arrays, how)

    def gather(self, arrays: Sequence[Values]) -> Values:
        """Return all devices' arrays, stacked in the order of ranks."""
        return self._run(arrays, "gather")

    def _run(self, arrays: Sequence[Values], how: str) -> Values:
        def exchange() -> Values:
            # Per thread: numbers of 64 bits stay what they are here, and only here.
            with jax.enable_x64(True):
                shards = [
                    jax.device_put(array[None], device)
                    for array, device in zip(arrays, self._mesh.local_devices, strict=True)
                ]
                shape = (self._mesh.size, *arrays[0].shape)
                sharding = NamedSharding(self._mesh, PartitionSpec(_AXIS))
                whole = jax.make_array_from_single_device_arrays(shape, sharding, shards)
                # A copy: what jax hands out cannot be written to.
                return np.array(_program(self._mesh, how)(whole).addressable_data(0))

        if jax.process_count() == 1:
            return exchange()
        return _within(self.timeout_s, exchange)


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh, how: str) -> Callable[[jax.Array], jax.Array]:
    """Return the compiled exchange; jax keeps one for every shape and format."""
    replicated = NamedSharding(mesh, PartitionSpec())
    if how == "gather":
        return jax.jit(lambda whole: whole, out_shardings=replicated)
    over = {
        "sum": jax.lax.psum,
        "mean": jax.lax.pmean,
        "max": jax.lax.pmax,
        "min": jax.lax.pmin,
    }[how]
    return jax.jit(
        jax.shard_map(
            lambda piece: over(piece[0], _AXIS),
            mesh=mesh,
            in_specs=PartitionSpec(_AXIS),
            out_specs=PartitionSpec(),
        )
    )


def agree(call: str, *, timeout_s: float) -> None:
    """Wait until every process is about to make the same call.

    Raises:
        CommunicationTimeout: Some have not come in time; the message names them.
        TPUDistributedError: The processes are about to make different calls.
    """
    client = coordination_client()
    number = next(_calls)
    # Two folders are enough: nobody writes to one again before all have read what it held.
    folder = f"tpukit/collectives/{number % 2}/"
    said = json.dumps([number, call])
    client.key_value_set(f"{folder}{jax.process_index()}", said, allow_overwrite=True)
    try:
        client.wait_at_barrier(f"tpukit/collectives/{number}", int(timeout_s * 1000))
    except RuntimeError as error:
        came = {rank for rank, (n, _) in _said(client, folder).items() if n == number}
        missing = sorted(set(range(jax.process_count())) - came)
        raise CommunicationTimeout(
            f"{call}: {_ranks(missing)} did not come within {timeout_s:g} s. Every process must "
            "make the same calls in the same order; look at the output of those that are missing, "
            "or give XLADistributedTraining a longer timeout_s."
        ) from error
    calls = {rank: call for rank, (_, call) in sorted(_said(client, folder).items())}
    if len(set(calls.values())) > 1:
        first: dict[str, int] = {}
        for rank, one in calls.items():
            first.setdefault(one, rank)
        listed = ", ".join(f"rank {rank} {one}" for one, rank in first.items())
        raise TPUDistributedError(
            f"the processes disagree about their next step: {listed}. Every process must make the "
            "same calls in the same order, with the same shapes and formats."
        )


def _said(client: Any, folder: str) -> dict[int, tuple[int, str]]:
    """Return the number and name of each rank's latest call under a folder."""
    found = client.key_value_dir_get(folder)
    return {int(key.rpartition("/")[2]): tuple(json.loads(text)) for key, text in found}


def _within(timeout_s: float, exchange: Callable[[], Values]) -> Values:
    """Run an exchange, which nothing can interrupt, and stop waiting for it after a while."""
    future: Future[Values] = Future()

    def run() -> None:
        try:
            future.set_result(exchange())
        except BaseException as error:  # noqa: BLE001  raised by whoever waits
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="tpukit-collective").start()
    try:
        return future.result(timeout_s)
    except TimeoutError as error:
        raise CommunicationTimeout(
            f"an exchange that all processes had agreed on did not end within {timeout_s:g} s; "
            "one of them stopped meanwhile."
        ) from error
    except RuntimeError as error:
        raise TPUDistributedError(f"an exchange between processes failed: {error}") from error


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
