"""`TPUMemoryManager`: torch tensors within a chip's memory, counted, pooled and watched."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ...errors import TPUMemoryPoolError, TPUOutOfMemoryError, TPUValidationError, did_you_mean
from ...hardware.figure import format_quantity
from ...models.adapters.torch_module.environment import require_torch
from ...observe.memory_watch import watch
from ..config import tpu_settings
from .ledger import AllocationLedger, AllocationRecord
from .limits import memory_limit
from .pools import TensorPool
from .stats import MemoryStats, device_memory

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

USUAL_WATCH_S = 60.0


class TPUMemoryManager:
    """Makes tensors while they fit the limit, and lends tensors of pools that are made once.

    Tensors are torch's own: on the GPU where torch has one, else on the host, from where a prepared
    model takes them. The limit is that of the configured chip (`v6e_memory_gb`, `v7_memory_gb` and
    `memory_per_chip` go before the catalogue), else of what is here, times `memory_fraction`.

    Args:
        config: `KernelPyTorchConfig`, its `hardware.tpu`, or a `TPUConfig`; None for defaults.

    Example:
        >>> manager = TPUMemoryManager(KernelPyTorchConfig(version="v6e", memory_fraction=0.9))
        >>> tensor = manager.allocate_tensor((1000, 1000))
        >>> manager.get_memory_stats().allocated_memory
        4000000
    """

    def __init__(
        self, config: object = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._torch = require_torch("TPUMemoryManager")
        self.settings = tpu_settings(config)
        self.device = self._torch.device("cuda" if self._torch.cuda.is_available() else "cpu")
        self.limit = memory_limit(self.settings)
        self._limit_bytes = int(self.limit.require("a memory limit"))
        self._ledger = AllocationLedger(
            retention_s=self.settings.allocation_history_retention_seconds, clock=clock
        )
        self._pools: dict[str, TensorPool] = {}
        self._pools_made = 0
        self._lock = threading.Lock()  # what is left may not change between question and answer

    def allocate_tensor(
        self, shape: int | Sequence[int], dtype: "torch.dtype | None" = None
    ) -> "torch.Tensor":
        """Make a tensor whose values are not set; it is counted until its memory is free again.

        Args:
            shape: Its sizes.
            dtype: A format of torch; `torch.float32` by default.

        Raises:
            TPUOutOfMemoryError: It does not fit the limit, or the machine has no more.
            TPUValidationError: A size is negative, or the format is none of torch's.
        """
        sizes, kind, size_bytes = self._measure(shape, dtype)
        with self._lock:
            self._refuse_if_too_large(size_bytes, sizes, kind, count=1)
            return self._make(sizes, kind, size_bytes)

    def create_memory_pool(
        self,
        pool_size: int,
        tensor_size: int | Sequence[int],
        dtype: "torch.dtype | None" = None,
    ) -> str:
        """Make a pool of equal tensors, all at once.

        Args:
            pool_size: How many.
            tensor_size: The shape of each.
            dtype: A format of torch; `torch.float32` by default.

        Returns:
            What the other functions call the pool by.

        Raises:
            TPUOutOfMemoryError: All of them together do not fit.
            TPUValidationError: A size makes no pool.
        """
        if pool_size < 1:
            raise TPUValidationError(f"pool_size={pool_size} makes no pool; give at least 1.")
        sizes, kind, size_bytes = self._measure(tensor_size, dtype)
        with self._lock:
            self._refuse_if_too_large(size_bytes, sizes, kind, count=pool_size)
            self._pools_made += 1
            name = f"pool_{self._pools_made}"
            pool = TensorPool(name, lambda: self._make(sizes, kind, size_bytes), pool_size)
            self._pools[name] = pool
        facts = {"pool": name, "tensors": pool_size, "bytes": pool.size_bytes}
        logger.info("pool created", extra=facts)
        return name

    def get_tensor_from_pool(self, pool_id: str) -> "torch.Tensor":
        """Lend a tensor of a pool; its values are what its last user left.

        Raises:
            TPUMemoryPoolError: There is no such pool, or all of its tensors are lent.
        """
        pool = self._pools.get(pool_id)
        return (self._find(pool_id) if pool is None else pool).get()

    def return_tensor_to_pool(self, pool_id: str, tensor: "torch.Tensor") -> None:
        """Take back what a pool lent.

        Raises:
            TPUMemoryPoolError: There is no such pool, or the tensor is not one it has lent.
        """
        pool = self._pools.get(pool_id)
        (self._find(pool_id) if pool is None else pool).give_back(tensor)

    def delete_memory_pool(self, pool_id: str) -> None:
        """Let a pool go; tensors it has lent live on until they are dropped.

        Raises:
            TPUMemoryPoolError: There is no such pool.
        """
        pool = self._find(pool_id)
        del self._pools[pool_id]
        logger.info("pool deleted", extra={"pool": pool_id, "bytes": pool.size_bytes})

    def get_pool_stats(self) -> dict[str, Any]:
        """Counts of all pools, and of each under `pool_details`."""
        details = {name: dict(pool.stats()) for name, pool in self._pools.items()}
        return {
            "total_pools": len(details),
            "total_bytes": sum(one["size_bytes"] for one in details.values()),
            "tensors_in_use": sum(one["in_use"] for one in details.values()),
            "pool_details": details,
        }

    def get_memory_stats(self) -> MemoryStats:
        """What is allocated now, and what is left."""
        return MemoryStats(
            at=datetime.now(UTC),
            allocated_memory=self._ledger.allocated_bytes,
            peak_memory=self._ledger.peak_bytes,
            pooled_memory=sum(pool.size_bytes for pool in self._pools.values()),
            limit=self.limit,
            device_memory=device_memory(),
            tensors=self._ledger.alive,
            allocations=self._ledger.allocations,
        )

    def monitor_memory(
        self, interval: float | None = None, duration: float | None = None
    ) -> list[MemoryStats]:
        """Take readings for a while; Ctrl-C ends it early and returns what was read.

        Args:
            interval: Seconds between two; by default `monitoring_interval_seconds`.
            duration: Seconds in all; by default `monitoring_duration_seconds`, or a minute.
        """
        settings = self.settings
        every_s = settings.monitoring_interval_seconds if interval is None else interval
        stated_s = settings.monitoring_duration_seconds if duration is None else duration
        for_s = USUAL_WATCH_S if stated_s is None else stated_s
        readings = watch(
            self.get_memory_stats, interval_s=every_s, duration_s=for_s, on_reading=_log_reading
        )
        peak = max((one.allocated_memory for one in readings), default=0)
        logger.info("memory watched", extra={"readings": len(readings), "peak_bytes": peak})
        return readings

    def allocation_history(self) -> list[AllocationRecord]:
        """Allocations and their ends, as far back as the configuration has them remembered."""
        return self._ledger.history()

    def _measure(self, shape: int | Sequence[int], dtype: Any) -> tuple[tuple[int, ...], Any, int]:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = self._torch.float32 if dtype is None else dtype
        if not isinstance(kind, self._torch.dtype):
            raise TPUValidationError(
                f"dtype={dtype!r} is no torch.dtype; give e.g. torch.bfloat16."
            )
        if any(size < 0 for size in sizes):
            raise TPUValidationError(f"a tensor of shape {sizes} has a size below 0.")
        return sizes, kind, math.prod(sizes) * kind.itemsize

    def _refuse_if_too_large(
        self, size_bytes: int, sizes: tuple[int, ...], kind: Any, *, count: int
    ) -> None:
        asked, used = size_bytes * count, self._ledger.allocated_bytes
        if used + asked <= self._limit_bytes:
            return
        name = f"{str(kind).removeprefix('torch.')}{list(sizes)}"
        what = name if count == 1 else f"{count} tensors {name}"
        left = format_quantity(max(0, self._limit_bytes - used), "B")
        logger.error("out of memory", extra={"asked_bytes": asked, "allocated_bytes": used})
        raise TPUOutOfMemoryError(
            f"{what} needs {format_quantity(asked, 'B')}, and {left} of "
            f"{format_quantity(self._limit_bytes, 'B')} are left ({self.limit.source}, "
            f"memory_fraction={self.settings.memory_fraction:g}); drop tensors or pools, ask for "
            "less, or raise the limit."
        )

    def _make(self, sizes: tuple[int, ...], kind: Any, size_bytes: int) -> Any:
        try:
            tensor = self._torch.empty(sizes, dtype=kind, device=self.device)
        except RuntimeError as error:  # torch has no class of its own for it on the host
            first = str(error).splitlines()[0]
            raise TPUOutOfMemoryError(
                f"{format_quantity(size_bytes, 'B')} cannot be had on this machine's "
                f"{self.device.type}, though the limit allows it: {first}"
            ) from error
        self._ledger.add(tensor.untyped_storage(), size_bytes)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("allocated", extra={"shape": list(sizes), "bytes": size_bytes})
        return tensor

    def _find(self, pool_id: str) -> TensorPool:
        if pool_id not in self._pools:
            known = ", ".join(self._pools) or "none"
            raise TPUMemoryPoolError(
                f"there is no pool {pool_id!r}; there is {known}, and create_memory_pool makes one."
                + did_you_mean(str(pool_id), self._pools)
            )
        return self._pools[pool_id]


def _log_reading(stats: MemoryStats) -> None:
    facts = {"allocated_bytes": stats.allocated_memory, "limit_bytes": stats.limit_memory}
    logger.debug("memory read", extra=facts)
