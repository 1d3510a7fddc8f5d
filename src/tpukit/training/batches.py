"""Batches on a mesh: global arrays, made of the rows that each process loads."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..errors import TPUValidationError
from .data.stream import DataStream

HostBatch = Mapping[str, np.ndarray]


def data_share(sharding: NamedSharding, rows: int) -> tuple[int, int]:
    """Return which share of a batch's rows this process loads: (index, number of shares).

    Processes with the same rows (tensor parallelism across hosts) load the same share. If the
    rows of a process are not one block of equal size, every process loads all rows: (0, 1).
    """
    blocks: dict[int, set[tuple[int, int]]] = {}
    for device, index in sharding.devices_indices_map((rows,)).items():
        span = index[0].indices(rows)[:2]
        blocks.setdefault(device.process_index, set()).add(span)
    spans = {process: _one_block(parts) for process, parts in blocks.items()}
    shares = sorted({span for span in spans.values() if span is not None})
    edges = [index * rows // max(1, len(shares)) for index in range(len(shares) + 1)]
    if None in spans.values() or shares != list(itertools.pairwise(edges)):
        return 0, 1
    own = spans[jax.process_index()]
    assert own is not None  # no span is, here
    return shares.index(own), len(shares)


def _one_block(parts: set[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the rows as one span, or None if there are gaps."""
    ordered = sorted(parts)
    for (_, stop), (start, _) in itertools.pairwise(ordered):
        if stop != start:
            return None
    return ordered[0][0], ordered[-1][1]


class BatchSource:
    """Draws batches and places them on the mesh; `waited_s` is the time spent waiting for data.

    Args:
        stream: This process's rows of every batch.
        shardings: The sharding of each batch entry.
        share: (index, number of shares) from `data_share`.
    """

    def __init__(
        self, stream: DataStream, shardings: Mapping[str, NamedSharding], share: tuple[int, int]
    ) -> None:
        self._stream, self._shardings, self._share = stream, shardings, share
        self._seen: tuple[dict[str, Any], dict[str, np.ndarray]] | None = None
        self.waited_s = 0.0

    def look(self) -> None:
        """Draw the next batch early, so that wrong data are refused before a long compile."""
        if self._seen is None:
            before = self._stream.state()
            with contextlib.suppress(StopIteration):
                self._seen = before, next(self._stream)

    def draw(self) -> dict[str, np.ndarray]:
        """Return this process's rows of the next batch; StopIteration at the end of the data."""
        if self._seen is not None:
            (_, batch), self._seen = self._seen, None
            return batch
        began = time.perf_counter()
        try:
            return next(self._stream)
        finally:
            self.waited_s += time.perf_counter() - began

    def place(self, batch: HostBatch) -> dict[str, jax.Array]:
        """Return the batch as global arrays; every process contributes its rows."""
        shardings = {name: self._sharding(name) for name in batch}
        narrow = {
            name: rows.astype(jax.dtypes.canonicalize_dtype(rows.dtype), copy=False)
            for name, rows in batch.items()
        }
        if jax.process_count() == 1:
            return jax.device_put(narrow, shardings)
        return {name: self._global(rows, shardings[name]) for name, rows in narrow.items()}

    def state(self) -> dict[str, Any]:
        """Return the position in the data after the last batch that was drawn."""
        return self._stream.state() if self._seen is None else self._seen[0]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Move to the position that `state()` returned."""
        self._seen = None
        self._stream.restore(state)

    def close(self) -> None:
        """Stop reading ahead."""
        self._stream.close()

    def _sharding(self, name: str) -> NamedSharding:
        # An unknown entry is placed like the others; the step's check then names it.
        return self._shardings.get(name) or next(iter(self._shardings.values()))

    def _global(self, rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
        number, count = self._share
        shape = (rows.shape[0] * count, *rows.shape[1:])
        first = rows.shape[0] * number

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # jax passes an index for every shard
            start, stop, _ = index[0].indices(shape[0])
            return rows[(slice(start - first, stop - first), *index[1:])]

        return jax.make_array_from_callback(shape, sharding, shard)


def look_ahead(source: Any) -> tuple[dict[str, jax.ShapeDtypeStruct], Any]:
    """Return the shapes of an iterable's batches, and the iterable with its first batch."""
    from .data.iterated import as_batch

    name = f"a {type(source).__name__}"
    if callable(source):
        first, batches = _first(cast("Iterable[Any]", source()), name), source
    elif iter(source) is not source:
        first, batches = _first(source, name), source
    else:
        first, batches = _first_and_rest(source, name)
    batch = as_batch(first, name)
    shapes = {
        key: jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))
        for key, value in batch.items()
    }
    return shapes, batches


def _first(source: Iterable[Any], name: str) -> Any:
    for element in source:
        return element
    raise TPUValidationError(f"{name} yields no batch; expected at least one.")


def _first_and_rest(source: Any, name: str) -> tuple[Any, Any]:
    take: Callable[[], Any] | None = getattr(source, "state", getattr(source, "get_state", None))
    put: Callable[[Any], None] | None = getattr(
        source, "restore", getattr(source, "set_state", None)
    )
    if take is not None and put is not None:
        before = take()
        first = _first(source, name)
        put(before)
        return first, source
    first = _first(source, name)
    return first, itertools.chain([first], source)
