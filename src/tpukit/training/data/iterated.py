"""Batches from any iterable; they resume after a restart if the iterable allows it."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ...errors import TPUValidationError
from .stream import Batch, DataDescription, Stopwatch, check_same

BatchIterable = Iterable[Any] | Callable[[], Iterator[Any]]


@dataclass(frozen=True, eq=False, kw_only=True)
class IteratedData:
    """An iterable of batches, or a function that starts one.

    A batch is a mapping of arrays, a pair (inputs, targets), or tokens (B, S + 1), where each
    target is the next token. It has `batch_size` rows, of which this process takes its share, or
    `batch_size / process_count` rows, which are all this process's.
    """

    source: BatchIterable
    sequence_length: int | None
    batch_size: int
    vocab_size: int | None
    process_index: int
    process_count: int
    num_epochs: int | None

    @property
    def name(self) -> str:
        """The iterable's name in messages."""
        return getattr(self.source, "name", None) or f"a {type(self.source).__name__}"

    def describe(self) -> DataDescription:
        """Return what is known without drawing a batch."""
        return DataDescription(
            kind="iterable",
            path=self.name,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
        )

    def stream(self) -> "IteratedStream":
        """Return a stream of batches from the start."""
        return IteratedStream(self)

    @property
    def restarts(self) -> bool:
        """Whether the iterable can be iterated more than once."""
        return callable(self.source) or iter(self.source) is not self.source

    def start(self) -> Iterator[Any]:
        """Start an iteration."""
        return iter(self.source() if callable(self.source) else self.source)

    def own_rows(self, element: Any) -> Batch:
        """Return this process's rows of one batch.

        Raises:
            TPUValidationError: The element is not a batch, or of another size.
        """
        batch = as_batch(element, self.name)
        local = self.batch_size // self.process_count
        first = self.process_index * local
        for key, value in batch.items():
            rows = value.shape[0] if value.ndim else 0
            if rows == self.batch_size:
                batch[key] = value[first : first + local]
            elif rows != local:
                raise TPUValidationError(
                    f"batch entry '{key}' of {self.name} has shape {value.shape}; expected "
                    f"{self.batch_size} rows (of all processes)"
                    + (f" or {local} (this process's)." if local != self.batch_size else ".")
                )
        self._check_tokens(batch)
        return batch

    def _check_tokens(self, batch: Batch) -> None:
        inputs = batch.get("inputs")
        if inputs is None or not np.issubdtype(inputs.dtype, np.integer):
            return
        if self.sequence_length is not None and inputs.shape[1:] != (self.sequence_length,):
            raise TPUValidationError(
                f"inputs of {self.name} have shape {inputs.shape}; expected rows of "
                f"sequence_length={self.sequence_length} tokens."
            )
        largest = int(inputs.max(initial=0))
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise TPUValidationError(
                f"{self.name} yielded the token {largest}, but the model's vocabulary ends at "
                f"{self.vocab_size - 1} (vocab_size={self.vocab_size})."
            )


class IteratedStream:
    """Batches of `IteratedData`.

    The position is the iterator's own state if it has one (`state`/`restore`, or grain's
    `get_state`/`set_state`). Otherwise it is the number of batches drawn, and restoring draws as
    many batches again.
    """

    def __init__(self, data: IteratedData) -> None:
        self._data = data
        self._iterator: Iterator[Any] = data.start()
        self._batches = self._epoch = self._in_epoch = 0
        self._first: str | None = None  # digest of the first batch
        self._waiting = Stopwatch()

    @property
    def waited_s(self) -> float:
        """Seconds spent in `next`."""
        return self._waiting.total_s

    def __iter__(self) -> "IteratedStream":
        return self

    def __next__(self) -> Batch:
        with self._waiting:
            drawn = self._draw()
            batch = self._data.own_rows(drawn)
        if self._first is None:
            self._first = self._digest(as_batch(drawn, self._data.name))
        self._batches += 1
        self._in_epoch += 1
        return batch

    def _draw(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            if self._in_epoch == 0:
                raise TPUValidationError(
                    f"{self._data.name} yields no batch; expected at least one."
                ) from None
        epochs = self._data.num_epochs
        if not self._data.restarts or (epochs is not None and self._epoch + 1 >= epochs):
            raise StopIteration
        self._epoch, self._in_epoch = self._epoch + 1, 0
        self._iterator = self._data.start()
        return self._draw()

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch."""
        state: dict[str, Any] = {"kind": "iterable", "batches": self._batches}
        state |= {"first_batch": self._first, "epoch": self._epoch, "in_epoch": self._in_epoch}
        take = _method(self._iterator, "state", "get_state")
        return state if take is None else {**state, "iterator": take()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Move to a position of `state()`.

        Raises:
            TPUValidationError: The position is of other data, or the iterable cannot move there.
        """
        check_same(state, {"kind": "iterable"}, path=self._data.name)
        own = state.get("iterator")
        if own is not None:
            put = _method(self._iterator, "restore", "set_state")
            if put is None:
                raise TPUValidationError(
                    f"this position is the state of an iterator, but {self._data.name} has no "
                    "method "
                    "to restore one. Give the same kind of iterable."
                )
            put(own)
            self._batches, self._first = int(state["batches"]), state["first_batch"]
            self._epoch, self._in_epoch = int(state["epoch"]), int(state["in_epoch"])
            return
        self._replay(int(state["batches"]), state["first_batch"])

    def _replay(self, batches: int, first_batch: str | None) -> None:
        if self._batches:
            if not self._data.restarts:
                raise TPUValidationError(
                    f"{self._data.name} has yielded batches and cannot start again. Give a list, a "
                    "function that makes the iterator, or one with state() and restore()."
                )
            self._iterator = self._data.start()
        self._batches = self._epoch = self._in_epoch = 0
        self._first = None
        for _ in range(batches):
            next(self)
            if self._first != first_batch:
                raise TPUValidationError(
                    f"this position in the data cannot be restored on {self._data.name}, because "
                    "its "
                    "first batch differs. Give the same data in the same order, or start a new "
                    "run."
                )

    def close(self) -> None:
        """Close the iterator if it has a `close` method."""
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()

    def _digest(self, batch: Batch) -> str:
        """Return the batch's digest; "" if every process draws its own, different rows."""
        digest = hashlib.blake2b(digest_size=16)
        for key in sorted(batch):
            value = np.ascontiguousarray(batch[key])
            if len(value) != self._data.batch_size:
                return ""
            digest.update(f"{key}{value.shape}{value.dtype};".encode())
            digest.update(value.tobytes())
        return digest.hexdigest()


def as_batch(element: Any, name: str) -> Batch:
    """Convert an element of an iterable to a mapping of arrays.

    Raises:
        TPUValidationError: The element is not a batch.
    """
    if isinstance(element, Mapping):
        entries = cast("Mapping[str, Any]", element)
        return {str(key): np.asarray(value) for key, value in entries.items()}
    if _is_pair(element):
        inputs, targets = cast("tuple[Any, Any]", element)
        return {"inputs": np.asarray(inputs), "targets": np.asarray(targets)}
    tokens = np.asarray(element)
    if tokens.ndim == 2 and np.issubdtype(tokens.dtype, np.integer) and tokens.shape[1] > 1:
        narrow = tokens.astype(np.int32)
        return {"inputs": narrow[:, :-1], "targets": narrow[:, 1:]}
    if tokens.ndim == 0:
        raise TPUValidationError(
            f"{name} yielded {element!r:.40}, which is not a batch; give tokens as an array "
            "(np.array(tokens)), and text as a file with a tokenizer."
        )
    raise TPUValidationError(
        f"{name} yielded a {type(element).__name__} of shape {tokens.shape} and dtype "
        f"{tokens.dtype}; "
        "expected a mapping of arrays, a pair (inputs, targets), or integer tokens (B, S + 1)."
    )


def _is_pair(element: Any) -> bool:
    """Return whether this is (inputs, targets); torch's DataLoader yields a list of two tensors."""
    if not isinstance(element, tuple | list) or len(cast("list[Any]", element)) != 2:
        return False
    return isinstance(element, tuple) or all(hasattr(part, "shape") for part in element)  # pyright: ignore[reportUnknownVariableType]


def _method(iterator: Any, *names: str) -> Callable[..., Any] | None:
    for name in names:
        method = getattr(iterator, name, None)
        if callable(method):
            return method
    return None
