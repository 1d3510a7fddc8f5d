"""From this process's rows of a batch to global arrays on a mesh, with the waiting measured."""

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
    """Which share of a batch's rows this process has to load: (index, number of shares).

    Processes that hold the same rows (tensor parallelism across hosts) load the same share. Where
    a process's rows are not one even block, every process loads the whole batch: (0, 1).
    """
    blocks: dict[int, set[tuple[int, int]]] = {}
    for device, index in sharding.devices_indices_map((rows,)).items():
        span = index[0].indices(rows)[:2]
        blocks.setdefault(device.process_index, set()).add(span)
    spans = {process: _one_block(parts) for process, parts in blocks.items()}
    shares = sorted({span for span in spans.values() if span is not None})
    edges = [place * rows // max(1, len(shares)) for place in range(len(shares) + 1)]
    if None in spans.values() or shares != list(itertools.pairwise(edges)):
        return 0, 1
    own = spans[jax.process_index()]
    assert own is not None  # no span is, here
    return shares.index(own), len(shares)


def _one_block(parts: set[tuple[int, int]]) -> tuple[int, int] | None:
    """The rows as one span, or None when there are gaps."""
    ordered = sorted(parts)
    for (_, stop), (start, _) in itertools.pairwise(ordered):
        if stop != start:
            return None
    return ordered[0][0], ordered[-1][1]


class BatchSource:
    """Batches on the mesh, one after another, and how long the devices waited for them.

    Args:
        stream: This process's rows of every batch.
        shardings: Where each entry goes.
        share: (index, number of shares) as `data_share` gave it.
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
        """This process's rows of the next batch; StopIteration at the end of the data."""
        if self._seen is not None:
            (_, batch), self._seen = self._seen, None
            return batch
        began = time.perf_counter()
        try:
            return next(self._stream)
        finally:
            self.waited_s += time.perf_counter() - began

    def place(self, batch: HostBatch) -> dict[str, jax.Array]:
        """The whole batch as global arrays, of which every process gives its part."""
        shardings = {name: self._place_of(name) for name in batch}
        narrow = {
            name: rows.astype(jax.dtypes.canonicalize_dtype(rows.dtype), copy=False)
            for name, rows in batch.items()
        }
        if jax.process_count() == 1:
            return jax.device_put(narrow, shardings)
        return {name: self._global(rows, shardings[name]) for name, rows in narrow.items()}

    def state(self) -> dict[str, Any]:
        """Where the data stand after the last batch drawn."""
        return self._stream.state() if self._seen is None else self._seen[0]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back, or ahead, to where `state` was taken."""
        self._seen = None
        self._stream.restore(state)

    def close(self) -> None:
        """Stop reading ahead."""
        self._stream.close()

    def _place_of(self, name: str) -> NamedSharding:
        # An entry nobody knows goes where the others go; the check of the step then names it.
        return self._shardings.get(name) or next(iter(self._shardings.values()))

    def _global(self, rows: np.ndarray, place: NamedSharding) -> jax.Array:
        index, count = self._share
        shape = (rows.shape[0] * count, *rows.shape[1:])
        first = rows.shape[0] * index

        def part(wanted: tuple[slice, ...] | None) -> np.ndarray:
            assert wanted is not None  # jax asks with an index wherever there are shards
            start, stop, _ = wanted[0].indices(shape[0])
            return rows[(slice(start - first, stop - first), *wanted[1:])]

        return jax.make_array_from_callback(shape, place, part)


def look_ahead(source: Any) -> tuple[dict[str, jax.ShapeDtypeStruct], Any]:
    """The shapes of an iterable's batches, and the iterable as it was before looking."""
    from .data.iterated import as_batch

    name = f"a {type(source).__name__}"
    if callable(source):
        first, whole = _first(cast("Iterable[Any]", source()), name), source
    elif iter(source) is not source:
        first, whole = _first(source, name), source
    else:
        first, whole = _first_and_rest(source, name)
    batch = as_batch(first, name)
    shapes = {
        key: jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))
        for key, value in batch.items()
    }
    return shapes, whole


def _first(source: Iterable[Any], name: str) -> Any:
    for element in source:
        return element
    raise TPUValidationError(f"{name} is empty; give one that yields batches.")


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
