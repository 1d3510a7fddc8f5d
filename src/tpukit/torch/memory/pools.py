"""A pool of equal tensors that are lent and come back: their buffers are made once."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import TPUMemoryPoolError


class TensorPool:
    """Tensors of one shape and format, all made at the start; it owns them also while lent."""

    def __init__(self, name: str, make: Callable[[], Any], size: int) -> None:
        self.name = name
        self._tensors = [make() for _ in range(size)]
        self._addresses = {id(one): one.data_ptr() for one in self._tensors}
        # The one that came back last goes out first: it is still in the processor's caches.
        self._free = list(self._tensors)
        self._lent: set[int] = set()
        self._lock = threading.Lock()
        self._gets = self._most_lent = self._refusals = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.numel() * one.element_size() for one in self._tensors)

    def get(self) -> Any:
        """Lend a tensor; its values are what the last user left.

        Raises:
            TPUMemoryPoolError: All are lent.
        """
        with self._lock:
            if not self._free:
                self._refusals += 1
                raise TPUMemoryPoolError(
                    f"all {len(self._tensors)} tensors of {self.name} are in use; return one with "
                    "return_tensor_to_pool, or create a pool with a larger pool_size."
                )
            tensor = self._free.pop()
            self._lent.add(id(tensor))
            self._gets += 1
            if len(self._lent) > self._most_lent:
                self._most_lent = len(self._lent)
            return tensor

    def give_back(self, tensor: Any) -> None:
        """Take a lent tensor back.

        Raises:
            TPUMemoryPoolError: It is not from this pool, is back already, or has other memory now.
        """
        with self._lock:
            number = id(tensor)
            if number not in self._lent:
                self._refuse(tensor)
            if tensor.data_ptr() != self._addresses[number]:
                raise TPUMemoryPoolError(
                    f"the tensor lent by {self.name} has other memory now (resize_, set_ or "
                    "`.data =` gave it another); write to it in place, e.g. tensor.copy_(…)."
                )
            self._lent.remove(number)
            self._free.append(tensor)

    def stats(self) -> Mapping[str, Any]:
        """Counts, and which share of the pool is in use."""
        with self._lock:
            size, lent = len(self._tensors), len(self._lent)
            first = self._tensors[0]
            return {
                "pool_size": size,
                "tensor_size": tuple(first.shape),
                "dtype": str(first.dtype).removeprefix("torch."),
                "in_use": lent,
                "available": size - lent,
                "utilization": lent / size,
                "most_in_use": self._most_lent,
                "gets": self._gets,
                "refusals": self._refusals,
                "size_bytes": self.size_bytes,
            }

    def _refuse(self, tensor: Any) -> None:
        if id(tensor) in self._addresses:
            raise TPUMemoryPoolError(
                f"this tensor is back in {self.name} already; return each one once."
            )
        raise TPUMemoryPoolError(
            f"a {type(tensor).__name__} that {self.name} never lent was returned to it; return the "
            "very tensor that get_tensor_from_pool gave, not a copy or a view of it."
        )
