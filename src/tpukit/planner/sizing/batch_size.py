"""`find_optimal_batch_size`: the fastest batch that fits, found by real compiles.

Memory does not grow evenly with the batch: the compiler schedules, fuses and rematerialises anew
for every size, and a larger batch has been seen to need less. So a search by halves alone can end
below the answer; the sizes just above it are tried as well. Every size that fits is also timed by
the timeline of its schedule, and the one with the most examples a second wins.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ...errors import TPUError, TPUOutOfMemoryError, TPUValidationError
from ...hardware import Slice, list_chips, list_slices
from ...hardware.missing import Measured, Missing, plain
from ...shown import rendered_html

if TYPE_CHECKING:
    from ...job.job import Job

NO_FLOPS = "the FLOPs of this model's step cannot be counted"
SIZES_ABOVE = 2  # tried beyond the first that does not fit
LARGEST = 4096  # examples a device
# Batches are doubled no further after so many doublings that gained less than this each.
IDLE_DOUBLINGS, LEAST_GAIN = 2, 0.01


@dataclass(frozen=True)
class Probe:
    """One batch that was compiled.

    Attributes:
        bytes_per_device: The compiler's figure.
        step_time_s: Predicted by the timeline (origin: model); None with `failure` saying why.
        mfu: Predicted share of the matrix unit's peak; None where nobody can count the FLOPs.
    """

    batch_size: int
    bytes_per_device: int | None
    fits: bool
    failure: str = ""
    step_time_s: float | None = None
    mfu: float | None = None

    @property
    def examples_per_s(self) -> float | None:
        """Predicted speed over all devices."""
        return None if not self.step_time_s else self.batch_size / self.step_time_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "examples_per_s": self.examples_per_s}


class OptimalBatchSize(int):
    """A batch size, which knows how it was found.

    Attributes:
        utilization: Share of the memory allowed that it uses (compiler).
        mfu: Its predicted MFU (model), or missing.
        slice: What it was compiled for.
        limit_bytes: Memory allowed on one device.
        probes: Every batch that was tried.
    """

    utilization: float
    mfu: Measured
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
        value.mfu = Missing(best.failure or NO_FLOPS) if best.mfu is None else best.mfu
        value.slice, value.limit_bytes, value.probes = str(where), limit_bytes, probes
        return value

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "batch_size": int(self),
            "utilization": self.utilization,
            "mfu": plain(self.mfu),
            "slice": self.slice,
            "limit_bytes": self.limit_bytes,
            "origin": "compiler",
            "speed_origin": "model",
            "probes": [probe.to_dict() for probe in self.probes],
        }

    def _repr_html_(self) -> str:
        return rendered_html(self)  # its text stays that of a number

    def __rich__(self) -> Table:
        headings = ("batch", "GiB a device\n(compiler)", "examples/s\n(model)", "MFU\n(model)", "")
        table = Table(*headings, title=f"batch sizes on {self.slice}")
        for probe in sorted(self.probes, key=lambda one: one.batch_size):
            size = probe.bytes_per_device
            speed, mfu = probe.examples_per_s, probe.mfu
            verdict = "fits" if probe.fits else probe.failure or "too large"
            chosen = " ← chosen" if probe.batch_size == self else ""
            table.add_row(
                f"{probe.batch_size}",
                "–" if size is None else f"{size / 2**30:.2f}",
                "–" if speed is None else f"{speed:,.1f}",
                "–" if mfu is None else f"{mfu:.1%}",
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
    """The fastest batch whose training step stays within a share of the memory.

    The matrix unit's utilization follows from the batch and cannot be chosen: every batch that is
    tried carries its predicted MFU, and of those that fit the one with the most examples a second
    wins. Larger ones are not tried after two doublings that gained less than 1 % each.

    Args:
        model: A preset's name, what `Workload` takes as its model, or a `Workload`.
        sequence_length: Tokens in an example.
        target_utilization: Share of the memory that a batch may fill.
        available_memory_gb: Memory of all chips together in GB (10⁹ bytes), any number above 0; by
            default what the compiler allows. Without `on`, the newest generation with a slice of
            just this memory is taken, else the slice with the least memory that is enough, of
            which a batch fills no more than this; `slice` of the result names it.
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

    low = idle = 0
    high = 1
    while high <= LARGEST and idle < IDLE_DOUBLINGS and fits(high):
        idle = idle + 1 if low and not _gains(seen[low], seen[high]) else 0
        low, high = high, 2 * high
    if idle == IDLE_DOUBLINGS:
        high = low + 1  # what lies above is not faster, whether or not it fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    for above in range(low + 2, low + 2 + SIZES_ABOVE) if idle < IDLE_DOUBLINGS else ():
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
    best = _fastest(tried) or seen[low]
    return OptimalBatchSize.found(best, where=where, limit_bytes=limit_bytes, probes=tried)


def _gains(small: Probe, large: Probe) -> bool:
    """Whether the larger batch is faster by more than next to nothing; unknown counts as yes."""
    before, after = small.examples_per_s, large.examples_per_s
    return before is None or after is None or after > before * (1 + LEAST_GAIN)


def _fastest(probes: tuple[Probe, ...]) -> Probe | None:
    """Of those that fit the one with the most examples a second; None where one is not timed."""
    fitting = [probe for probe in probes if probe.fits]
    if any(probe.examples_per_s is None for probe in fitting):
        return None
    return max(fitting, key=lambda probe: probe.examples_per_s or 0.0)


def _compiler(
    model: object,
    sequence_length: int,
    where: Slice,
    mesh: Mapping[str, int],
    limit_bytes: float,
    timeout_s: float,
) -> Callable[[int, Mapping[str, Any]], Probe]:
    from ...checker.check import predict
    from ...checker.compiling import lower_job
    from ...compiler.aot import run_request
    from ...job.job import Job

    flops_per_example: list[float | None] = []

    def compiled(examples: int, options: Mapping[str, Any]) -> Probe:
        shape = {"batch_size": examples, "sequence_length": sequence_length}
        try:
            job = Job.of(model, on=str(where), mesh=mesh, **shape, **options)
            request = lower_job(job, remember=False)
            found = run_request(request, until="schedule", timeout_s=timeout_s)
        except TPUError as error:
            return Probe(examples, None, False, str(error))
        used = found.memory.total_bytes
        if not (found.fits and used <= limit_bytes):
            return Probe(examples, used, False)
        if not flops_per_example:
            counted = _step_flops(job)
            flops_per_example.append(None if counted is None else counted / examples)
        each = flops_per_example[0]
        step, why = predict(found, model_flops=None if each is None else each * examples)
        seconds, mfu = (None, None) if step is None else (step.step_time_s, step.mfu)
        return Probe(examples, used, True, why, seconds, mfu)

    return compiled


def _step_flops(job: "Job") -> float | None:
    """FLOPs of the model in a step; of a reference transformer nothing needs to be built."""
    from ...job.step import build_step
    from ...step.traced_flops import model_flops

    if job.model_flops is not None:
        return job.model_flops
    return model_flops(build_step(job, values=False).work).value


def _examples_per_step(mesh: Mapping[str, int], where: Slice) -> int:
    """Count the examples of a step in which each device that shares a batch has one."""
    from ...hardware.mesh_sizes import fill_mesh
    from ...parallel.mesh.axes import count_batch_ways

    return count_batch_ways(fill_mesh(mesh, where))


def _slice(on: Slice | str | None, memory_gb: float | None) -> Slice:
    if on is not None:
        return Slice.parse(on) if isinstance(on, str) else on
    if memory_gb is None:
        raise TPUValidationError(
            "which chips? Give on='v6e-8', or available_memory_gb of all chips together."
        )
    if not 0 < memory_gb < math.inf:
        raise TPUValidationError(
            f"available_memory_gb={memory_gb:g}; give the memory of all chips together in GB, for "
            "example 32 * 64."
        )
    sizes = _slices_by_memory()
    for on, bytes_ in reversed(sizes):
        # Data sheets and people say GB for 2³⁰ bytes as well as for 10⁹.
        if any(abs(bytes_ / unit - memory_gb) <= 0.02 * memory_gb for unit in (1e9, 2**30)):
            return on
    enough = [(bytes_, on) for on, bytes_ in reversed(sizes) if bytes_ >= memory_gb * 1e9]
    if enough:
        return min(enough, key=lambda pair: pair[0])[1]  # the first, so the newest, of several
    return max(sizes, key=lambda pair: pair[1])[0]


def _slices_by_memory() -> list[tuple[Slice, float]]:
    """Return all slices with their HBM in bytes, oldest generation and largest slice first."""
    return [
        (on, per_chip * on.chips)
        for chip in list_chips()
        if (per_chip := chip.hbm_bytes.value) is not None and chip.rules
        for on in reversed(list_slices(chip.name))
    ]
