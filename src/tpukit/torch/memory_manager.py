"""`TPUMemoryManager`: torch tensors within a chip's memory, counted, pooled and watched."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..errors import TPUMemoryPoolError, TPUOutOfMemoryError, TPUValidationError, did_you_mean
from ..hardware import Chip, Figure, detect_accelerators, get_chip
from ..hardware.figure import format_quantity
from ..models.adapters.torch_module.environment import require_torch
from ..observe.memory_watch import watch
from ..observe.sources.machine import JaxSource
from ..plain_data import JsonObject
from ..shown import Renderable, Shown
from .config import TorchTPUConfig, tpu_settings
from .memory_pools import AllocationLedger, AllocationRecord, TensorPool


def memory_limit(settings: TorchTPUConfig) -> Figure:
    """Return the bytes that may be used, with the origin of the number.

    It is the memory of the configured chip (or `memory_per_chip`, `v6e_memory_gb` or `v7_memory_gb`
    instead), of the accelerator here, or of the host, in this order; times `memory_fraction`.
    """
    return _capacity(settings).scaled(settings.memory_fraction)


def _capacity(settings: TorchTPUConfig) -> Figure:
    stated = settings.resolved().memory_per_chip
    chip = settings.chip
    if chip is not None:
        usable = chip.hbm_usable_bytes
        if stated is None or (usable.value is not None and usable.value <= stated):
            return usable
    if stated is not None:
        return Figure(stated, "B", "user", "memory_per_chip, v6e_memory_gb or v7_memory_gb")
    return _here()


def _here() -> Figure:
    """Return the memory of a TPU here, of a GPU that torch can use, or of the host."""
    tpu = _chip_here()
    if tpu is not None:
        return tpu.hbm_usable_bytes
    import psutil
    import torch

    if torch.cuda.is_available():
        name, total = torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)[1]
        return Figure(total, "B", "measured", f"memory of {name}, by the driver")
    return Figure(psutil.virtual_memory().total, "B", "measured", "memory of this host")


def _chip_here() -> Chip | None:
    here = detect_accelerators()
    return get_chip(here.generation) if here.kind == "tpu" and here.generation else None


_COUNTED = "bytes of this manager's live tensors"


@dataclass(frozen=True, kw_only=True)
class MemoryStats(Shown):
    """One reading of a memory manager, in bytes.

    Attributes:
        at: Time of the reading.
        allocated_memory: Memory of the manager's live tensors, pools included.
        peak_memory: The most memory that was allocated at once.
        pooled_memory: Memory of the pools.
        limit: Memory that may be allocated, with the origin of the number.
        device_memory: Memory in use by jax on the accelerator, buffers of programs included; a
            missing figure with its reason if there is no accelerator.
        tensors: Number of live tensors.
        allocations: Number of tensors allocated so far; tensors from pools do not count.
    """

    at: datetime
    allocated_memory: int
    peak_memory: int
    pooled_memory: int
    limit: Figure
    device_memory: Figure
    tensors: int
    allocations: int

    @property
    def limit_memory(self) -> int:
        """Bytes that may be allocated."""
        return int(self.limit.require("the memory that is left"))

    @property
    def available_memory(self) -> int:
        """Bytes that may still be allocated."""
        return max(0, self.limit_memory - self.allocated_memory)

    @property
    def utilization(self) -> float:
        """Share of the limit that is allocated."""
        return self.allocated_memory / self.limit_memory

    def figures(self) -> dict[str, Figure]:
        """Return every quantity with its unit and origin."""
        counted = {
            name: Figure(getattr(self, name), "B", "measured", _COUNTED)
            for name in ("allocated_memory", "peak_memory", "pooled_memory")
        }
        available = Figure.derived(
            self.available_memory, "B", inputs=(self.limit, counted["allocated_memory"])
        )
        return {
            **counted,
            "limit": self.limit,
            "available_memory": available,
            "device_memory": self.device_memory,
        }

    def to_dict(self) -> JsonObject:
        """Plain data."""
        figures = {name: one.to_dict() for name, one in self.figures().items()}
        counts = {"tensors": self.tensors, "allocations": self.allocations}
        return {"at": self.at.isoformat(), **figures, **counts}

    def __rich__(self) -> Renderable:
        from rich.table import Table

        table = Table("memory", "", "origin", box=None, pad_edge=False)
        for name, figure in self.figures().items():
            shown = figure.origin or figure.reason
            table.add_row(
                name.replace("_", " "), figure.text, f"{shown}: {figure.source}".strip(": ")
            )
        return table


def device_memory() -> Figure:
    """Return what jax has in use on its first device, where it is known."""
    reading = JaxSource().read()
    used = reading.values("memory_used")
    if not used:
        return Figure.missing("B", f"{reading.missing['memory_used']}.")
    return Figure(used[0], "B", "measured", "jax's runtime, of its first device")


if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

USUAL_WATCH_S = 60.0


class TPUMemoryManager:
    """Allocates tensors within a limit, and lends tensors of pools.

    The tensors are torch tensors, on the GPU if torch has one, otherwise on the host, where a
    prepared model reads them. The limit is the memory of the configured chip (`v6e_memory_gb`,
    `v7_memory_gb` and `memory_per_chip` go before the catalogue) or of this machine, times
    `memory_fraction`.

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
        self._lock = threading.Lock()  # held from the check of the limit to the allocation

    def allocate_tensor(
        self, shape: int | Sequence[int], dtype: "torch.dtype | None" = None
    ) -> "torch.Tensor":
        """Allocate an uninitialized tensor; it counts until its memory is freed.

        Args:
            shape: Its shape.
            dtype: Its dtype; `torch.float32` by default.

        Raises:
            TPUOutOfMemoryError: It exceeds the limit, or the machine has no more memory.
            TPUValidationError: A size is negative, or the dtype is not a torch.dtype.
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
        """Allocate a pool of equal tensors.

        Args:
            pool_size: The number of tensors.
            tensor_size: The shape of each.
            dtype: Their dtype; `torch.float32` by default.

        Returns:
            The pool's id for the other methods.

        Raises:
            TPUOutOfMemoryError: All of them together exceed the limit.
            TPUValidationError: A size is not valid.
        """
        if pool_size < 1:
            raise TPUValidationError(f"pool_size={pool_size}; give at least 1.")
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
        """Lend a tensor of a pool, with the values that its last user left.

        Raises:
            TPUMemoryPoolError: There is no such pool, or all of its tensors are in use.
        """
        return self._find(pool_id).get()

    def return_tensor_to_pool(self, pool_id: str, tensor: "torch.Tensor") -> None:
        """Return a tensor to its pool.

        Raises:
            TPUMemoryPoolError: There is no such pool, or it did not lend the tensor.
        """
        self._find(pool_id).give_back(tensor)

    def delete_memory_pool(self, pool_id: str) -> None:
        """Delete a pool; lent tensors stay valid until they are dropped.

        Raises:
            TPUMemoryPoolError: There is no such pool.
        """
        pool = self._find(pool_id)
        del self._pools[pool_id]
        logger.info("pool deleted", extra={"pool": pool_id, "bytes": pool.size_bytes})

    def get_pool_stats(self) -> JsonObject:
        """Return counts of all pools, and of each under `pool_details`."""
        details = {name: dict(pool.stats()) for name, pool in self._pools.items()}
        return {
            "total_pools": len(details),
            "total_bytes": sum(pool["size_bytes"] for pool in details.values()),
            "tensors_in_use": sum(pool["in_use"] for pool in details.values()),
            "pool_details": details,
        }

    def get_memory_stats(self) -> MemoryStats:
        """Return a reading of allocated and available memory."""
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
        """Read the memory repeatedly; Ctrl-C ends it early and returns the readings so far.

        Args:
            interval: Seconds between two readings; by default `monitoring_interval_seconds`.
            duration: Seconds in total; by default `monitoring_duration_seconds`, or a minute.
        """
        settings = self.settings
        every_s = settings.monitoring_interval_seconds if interval is None else interval
        stated_s = settings.monitoring_duration_seconds if duration is None else duration
        for_s = USUAL_WATCH_S if stated_s is None else stated_s
        readings = watch(
            self.get_memory_stats, interval_s=every_s, duration_s=for_s, on_reading=_log_reading
        )
        peak = max((reading.allocated_memory for reading in readings), default=0)
        logger.info("memory watched", extra={"readings": len(readings), "peak_bytes": peak})
        return readings

    def allocation_history(self) -> list[AllocationRecord]:
        """Return allocations and releases within the configuration's retention time."""
        return self._ledger.history()

    def _measure(self, shape: int | Sequence[int], dtype: Any) -> tuple[tuple[int, ...], Any, int]:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = self._torch.float32 if dtype is None else dtype
        if not isinstance(kind, self._torch.dtype):
            raise TPUValidationError(
                f"dtype={dtype!r} is not a torch.dtype; give e.g. torch.bfloat16."
            )
        if any(size < 0 for size in sizes):
            raise TPUValidationError(
                f"a tensor of shape {sizes} has a negative size; give sizes from 0."
            )
        return sizes, kind, math.prod(sizes) * kind.itemsize

    def _refuse_if_too_large(
        self, size_bytes: int, sizes: tuple[int, ...], kind: Any, *, count: int
    ) -> None:
        needed, used = size_bytes * count, self._ledger.allocated_bytes
        if used + needed <= self._limit_bytes:
            return
        name = f"{str(kind).removeprefix('torch.')}{list(sizes)}"
        what = name if count == 1 else f"{count} tensors {name}"
        left = format_quantity(max(0, self._limit_bytes - used), "B")
        logger.error("out of memory", extra={"asked_bytes": needed, "allocated_bytes": used})
        raise TPUOutOfMemoryError(
            f"{what} needs {format_quantity(needed, 'B')}, but {left} of "
            f"{format_quantity(self._limit_bytes, 'B')} are left ({self.limit.source}, "
            f"memory_fraction={self.settings.memory_fraction:g}); drop tensors or pools, allocate "
            "less, or raise the limit."
        )

    def _make(self, sizes: tuple[int, ...], kind: Any, size_bytes: int) -> Any:
        try:
            tensor = self._torch.empty(sizes, dtype=kind, device=self.device)
        except RuntimeError as error:  # torch has no special class for it on the host
            first = str(error).splitlines()[0]
            raise TPUOutOfMemoryError(
                f"{format_quantity(size_bytes, 'B')} cannot be allocated on this machine's "
                f"{self.device.type}, although the limit allows it: {first}. Drop tensors."
            ) from error
        self._ledger.add(tensor.untyped_storage(), size_bytes)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("allocated", extra={"shape": list(sizes), "bytes": size_bytes})
        return tensor

    def _find(self, pool_id: str) -> TensorPool:
        pool = self._pools.get(pool_id)
        if pool is None:
            known = ", ".join(self._pools) or "none"
            raise TPUMemoryPoolError(
                f"there is no pool {pool_id!r} (pools: {known}); make one with create_memory_pool."
                + did_you_mean(str(pool_id), self._pools)
            )
        return pool


def _log_reading(stats: MemoryStats) -> None:
    facts = {"allocated_bytes": stats.allocated_memory, "limit_bytes": stats.limit_memory}
    logger.debug("memory read", extra=facts)
