"""`find_optimal_batch_size`: the fastest batch that fits, found by real compiles.

Memory does not grow evenly with the batch, because the compiler schedules each size anew; a larger
batch may need less. So bisection alone can stop too early, and the sizes just above its result are
tried as well. Every size that fits is timed from its compiled schedule, and the one with the most
examples per second is chosen.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..errors import TPUError, TPUOutOfMemoryError, TPUValidationError
from ..hardware import Slice, list_chips, list_slices
from ..hardware.missing import Measured, Missing, plain
from ..models.remat.policy import FULL
from ..plain_data import JsonMapping, JsonObject
from ..shown import Facts, rendered_html
from .cost.memory_model import MemorySplit

if TYPE_CHECKING:
    from ..job.job import Job


NO_FLOPS = "the FLOPs of this model's step cannot be counted"
SIZES_ABOVE = 2  # tried beyond the first that does not fit
LARGEST = 4096  # examples a device
# Doubling stops after this many doublings that each gained less than this.
IDLE_DOUBLINGS, LEAST_GAIN = 2, 0.01


@dataclass(frozen=True)
class Probe(Facts):
    """One batch size that was compiled.

    Attributes:
        bytes_per_device: HBM per device, from the compiler.
        step_time_s: Predicted from the compiled schedule; None with a reason in `failure`.
        mfu: Predicted MFU; None if the model's FLOPs are unknown.
    """

    batch_size: int
    bytes_per_device: int | None
    fits: bool
    failure: str = ""
    step_time_s: float | None = None
    mfu: float | None = None
    _facts = "* examples_per_s"

    @property
    def examples_per_s(self) -> float | None:
        """Predicted examples per second over all devices."""
        return None if not self.step_time_s else self.batch_size / self.step_time_s


class OptimalBatchSize(int):
    """A batch size, with the search that found it.

    Attributes:
        utilization: Share of the allowed memory that it uses.
        mfu: Its predicted MFU, or missing.
        slice: The slice that it was compiled for.
        limit_bytes: Allowed memory per device.
        probes: Every batch size that was tried.
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
        """Return the result of a search."""
        value = cls(best.batch_size)
        value.utilization = (best.bytes_per_device or 0) / limit_bytes
        value.mfu = Missing(best.failure or NO_FLOPS) if best.mfu is None else best.mfu
        value.slice, value.limit_bytes, value.probes = str(where), limit_bytes, probes
        return value

    def to_dict(self) -> JsonObject:
        """Return the result as plain data."""
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
    """Find the fastest batch whose training step stays within a share of the memory.

    MFU follows from the batch size, so it is reported for each probe. Of the sizes that fit, the
    one with the most examples per second is chosen. Sizes beyond two doublings that each gained
    less than 1 % are not tried.

    Args:
        model: A preset, a model that `Workload` takes, or a `Workload`.
        sequence_length: Tokens in an example.
        target_utilization: Share of the memory that a batch may use.
        available_memory_gb: Memory of all chips together in GB (10⁹ bytes); by default what the
            compiler allows. Without `on` it also selects the slice: the newest generation with
            exactly this memory, or else the smallest slice with enough. `slice` of the result names
            it.
        on: The slice to compile for.
        mesh: Sizes by axis; by default all devices on "fsdp".
        timeout_s: Time limit of each compile.
        **workload: Further keys of a `Job` (remat, strategy, train, …) or arguments of
            `Workload` (optimizer, loss, …).

    Raises:
        TPUValidationError: No slice is given, or a share is out of range.
        TPUOutOfMemoryError: One example per device does not fit.
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
    """Double the batch until it does not fit, bisect, then try the sizes just above."""
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
            f"{': ' + first.failure if first.failure else ''}; recompute more (remat='{FULL}'), "
            "split the model further, or take a larger slice."
        )
    tried = tuple(replace(one) for one in seen.values())
    best = _fastest(tried) or seen[low]
    return OptimalBatchSize.found(best, where=where, limit_bytes=limit_bytes, probes=tried)


def _gains(small: Probe, large: Probe) -> bool:
    """Whether the larger batch is measurably faster; unknown times count as faster."""
    before, after = small.examples_per_s, large.examples_per_s
    return before is None or after is None or after > before * (1 + LEAST_GAIN)


def _fastest(probes: tuple[Probe, ...]) -> Probe | None:
    """Return the fastest probe that fits; None if the time of one is unknown."""
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
) -> Callable[[int, JsonMapping], Probe]:
    from ..checker.check import predict
    from ..checker.compiling import lower_job
    from ..compiler.aot import run_request
    from ..job.job import Job

    flops_per_example: list[float | None] = []

    def compiled(examples: int, options: JsonMapping) -> Probe:
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
    """Return the model FLOPs of a step; a reference transformer need not be built."""
    from ..job.step import build_step
    from ..step.traced_flops import model_flops

    if job.model_flops is not None:
        return job.model_flops
    return model_flops(build_step(job, values=False).work).value


def _examples_per_step(mesh: Mapping[str, int], where: Slice) -> int:
    """Return the examples of a step with one example per device that the batch is split over."""
    from ..hardware.mesh_sizes import fill_mesh
    from ..parallel.mesh.axes import count_batch_ways

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
        # GB is used for 2³⁰ bytes as well as for 10⁹.
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


LARGEST_FALL = 0.05
"""A smaller batch whose figure is lower by more than this share ends the search: nothing below it
is expected to need more again."""

Compile = Callable[[int], MemorySplit]


def rising_memory(compile_batch: Compile, size: int) -> tuple[MemorySplit, bool]:
    """Return the memory of a batch, and whether it comes directly from one compile.

    Args:
        compile_batch: Returns the memory of a step with this many examples per device.
        size: Examples per device.

    Raises:
        TPUError: The step cannot be compiled with this batch.
    """
    found: dict[int, MemorySplit] = {}

    def of(examples: int) -> MemorySplit:
        if examples not in found:
            found[examples] = compile_batch(examples)
        return found[examples]

    low = 1 << (size.bit_length() - 1)
    if low == size:
        return _largest(of, size), True
    try:
        return _between(_largest(of, low), _largest(of, 2 * low), size / low - 1), False
    except TPUError:  # a model of one batch size has no neighbours
        return of(size), True


def _largest(of: Compile, size: int) -> MemorySplit:
    """Return the largest memory of `size` and of the smaller powers of two."""
    most = of(size)
    while size > 1:
        size //= 2
        try:
            smaller = of(size)
        except TPUError:
            return most
        if smaller.total < (1 - LARGEST_FALL) * most.total:
            return most
        if smaller.total > most.total:
            most = smaller
    return most


def _between(low: MemorySplit, high: MemorySplit, share: float) -> MemorySplit:
    parts = (one.name for one in fields(MemorySplit))
    return MemorySplit(
        **{name: (1 - share) * getattr(low, name) + share * getattr(high, name) for name in parts}
    )
