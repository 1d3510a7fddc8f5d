"""`find_optimal_batch_size`: the largest batch that fits, found by real compiles.

Memory does not grow evenly with the batch: the compiler schedules, fuses and rematerialises anew
for every size, and a larger batch has been seen to need less. So a search by halves alone can end
below the answer; the sizes just above it are tried as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from ...errors import TPUError, TPUOutOfMemoryError, TPUValidationError
from ...hardware import Slice, list_chips, list_slices

SIZES_ABOVE = 2  # tried beyond the first that does not fit
LARGEST = 4096  # examples a device


@dataclass(frozen=True)
class Probe:
    """One batch that was compiled."""

    batch_size: int
    bytes_per_device: int | None
    fits: bool
    failure: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))


class OptimalBatchSize(int):
    """A batch size, which knows how it was found. Figures are the compiler's.

    Attributes:
        utilization: Share of the memory allowed that it uses.
        slice: What it was compiled for.
        limit_bytes: Memory allowed on one device.
        probes: Every batch that was tried.
    """

    utilization: float
    slice: str
    limit_bytes: float
    probes: tuple[Probe, ...]

    @classmethod
    def found(
        cls, best: Probe, *, where: Slice, limit_bytes: float, probes: tuple[Probe, ...]
    ) -> "OptimalBatchSize":
        """The result of a search."""
        value = cls(best.batch_size)
        value.utilization = (best.bytes_per_device or 0) / limit_bytes
        value.slice, value.limit_bytes, value.probes = str(where), limit_bytes, probes
        return value

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "batch_size": int(self),
            "utilization": self.utilization,
            "slice": self.slice,
            "limit_bytes": self.limit_bytes,
            "origin": "compiler",
            "probes": [probe.to_dict() for probe in self.probes],
        }

    def __rich__(self) -> Table:
        table = Table("batch", "GiB a device (compiler)", "", title=f"batch sizes on {self.slice}")
        for probe in sorted(self.probes, key=lambda one: one.batch_size):
            size = probe.bytes_per_device
            verdict = "fits" if probe.fits else probe.failure or "too large"
            chosen = " ← chosen" if probe.batch_size == self else ""
            table.add_row(
                f"{probe.batch_size}",
                "–" if size is None else f"{size / 2**30:.2f}",
                verdict + chosen,
            )
        return table


def find_optimal_batch_size(
    model: object,
    sequence_length: int,
    target_utilization: float = 0.9,
    available_memory_gb: float | None = None,
    *,
    on: Slice | str | None = None,
    mesh: Mapping[str, int] | None = None,
    timeout_s: float = 1800.0,
    **workload: Any,
) -> OptimalBatchSize:
    """The largest batch whose training step stays within a share of the memory.

    Args:
        model: A preset's name, what `Workload` takes as its model, or a `Workload`.
        sequence_length: Tokens in an example.
        target_utilization: Share of the memory the step may use.
        available_memory_gb: Memory of all chips together in GB (10⁹ bytes); by default what the
            compiler allows. Without `on`, the newest generation whose slice has it is taken.
        on: The slice to compile for.
        mesh: Sizes by axis; all devices on "fsdp" by default.
        timeout_s: Of each compile.
        **workload: Further keys of a `Job` (remat, strategy, train, …) or arguments of
            `Workload` (optimizer, loss, …).

    Raises:
        TPUValidationError: Nothing says which slice, or a share is out of range.
        TPUOutOfMemoryError: Not even one example a device fits.
    """
    if not 0 < target_utilization <= 1:
        raise TPUValidationError(
            f"target_utilization={target_utilization} is no share; give one above 0, up to 1."
        )
    where = _slice(on, available_memory_gb)
    axes = dict(mesh or {"fsdp": -1})
    usable = where.chip.per_device(where.chip.hbm_usable_bytes).require("a batch size")
    given = usable
    if available_memory_gb is not None:
        given = min(usable, available_memory_gb * 1e9 / where.devices)
    probe = _compiler(model, sequence_length, where, axes, given * target_utilization, timeout_s)
    return _search(
        lambda examples: probe(examples, workload),
        where,
        given,
        per_step=_examples_per_step(axes, where),
    )


def _search(
    probe: Callable[[int], Probe], where: Slice, limit_bytes: float, *, per_step: int
) -> OptimalBatchSize:
    """Double until it no longer fits, halve the gap, then try just above."""
    seen: dict[int, Probe] = {}

    def fits(each: int) -> bool:
        if each not in seen:
            seen[each] = probe(each * per_step)
        return seen[each].fits

    low = 0
    high = 1
    while high <= LARGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    for above in range(low + 2, low + 2 + SIZES_ABOVE):
        if low and above <= LARGEST and fits(above):
            low = above
    if not low:
        first = seen[1]
        need = "" if first.bytes_per_device is None else f" ({first.bytes_per_device / 2**30:.1f}"
        need += f" of {limit_bytes / 2**30:.1f} GiB)" if need else ""
        raise TPUOutOfMemoryError(
            f"not even {per_step} examples, one a device, fit on {where}{need}"
            f"{': ' + first.failure if first.failure else ''}; recompute more (remat='full'), "
            "split the model further, or take a larger slice."
        )
    tried = tuple(replace(one) for one in seen.values())
    return OptimalBatchSize.found(seen[low], where=where, limit_bytes=limit_bytes, probes=tried)


def _compiler(
    model: object,
    sequence_length: int,
    where: Slice,
    mesh: Mapping[str, int],
    limit_bytes: float,
    timeout_s: float,
) -> Callable[[int, Mapping[str, Any]], Probe]:
    from ...checker.compiling import lower_job
    from ...compiler.aot import run_request
    from ...job.job import Job

    def compiled(examples: int, options: Mapping[str, Any]) -> Probe:
        shape = {"batch_size": examples, "sequence_length": sequence_length}
        try:
            job = Job.of(model, on=str(where), mesh=mesh, **shape, **options)
            found = run_request(lower_job(job, remember=False), until="memory", timeout_s=timeout_s)
        except TPUError as error:
            return Probe(examples, None, False, str(error))
        used = found.memory.total_bytes
        return Probe(examples, used, found.fits and used <= limit_bytes)

    return compiled


def _examples_per_step(mesh: Mapping[str, int], where: Slice) -> int:
    """Count the examples of a step in which each device that shares a batch has one."""
    from ...compiler.program.request import fill_mesh
    from ...parallel.mesh.axes import count_batch_ways

    return count_batch_ways(fill_mesh(mesh, where))


def _slice(on: Slice | str | None, memory_gb: float | None) -> Slice:
    if on is not None:
        return Slice.parse(on) if isinstance(on, str) else on
    if memory_gb is None:
        raise TPUValidationError(
            "which chips? Give on='v6e-8', or available_memory_gb of all chips together."
        )
    for chip in reversed(list_chips()):
        per_chip = chip.hbm_bytes.value
        if per_chip is None or not chip.rules:
            continue
        for on in list_slices(chip.name):
            # Data sheets and people say GB for 2³⁰ bytes as well as for 10⁹.
            sizes = (per_chip * on.chips / 1e9, per_chip * on.chips / 2**30)
            if any(abs(size - memory_gb) <= 0.02 * memory_gb for size in sizes):
                return on
    raise TPUValidationError(
        f"no slice has {memory_gb:g} GB of memory; name the slice with on=, for example "
        "on='v6e-64' (32 GB x 64 chips)."
    )
