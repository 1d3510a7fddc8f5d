"""`diagnose_performance`: why training is slow, measured here or predicted for any slice."""

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ...compiler import CompiledStep, compile_for
from ...compiler.program.request import fill_mesh
from ...compiler.timeline import StepPrediction
from ...errors import TPUModelError, TPUValidationError
from ...hardware import Figure, Slice, detect_accelerators
from ...job.job import Job
from ...job.step import build_step
from ...parallel.mesh.mesh import create_mesh
from ...step.workload import Workload
from .input_rate import InputRate, measure_input
from .issues import (
    bottleneck_issues,
    compile_issues,
    input_issues,
    memory_issues,
    target_issues,
)
from .reading import Bottlenecks, PerformanceDiagnosis, PerformanceIssue

STEPS, WARM_UP_STEPS = 5, 2
NOT_RUN = "no step was run"
NOT_COMPILED = "no slice was named to compile for"


@dataclass(frozen=True)
class StepTiming:
    """A few steps timed on the devices of this process."""

    step_time_s: float
    compile_s: float
    flops: float | None
    steps: int
    devices: str


def diagnose_performance(
    model: Any,
    dataloader: Iterable[Any] | None = None,
    target_tflops: float | None = None,
    *,
    on: Slice | str | None = None,
    mesh: Mapping[str, int] | None = None,
    measure: bool | None = None,
    steps: int = STEPS,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    options: Mapping[str, Any] | None = None,
    timeout_s: float = 1800.0,
) -> PerformanceDiagnosis:
    """Say why a training step takes its time, and what to do about it.

    With a slice, the step is compiled for it offline and its timeline says where the time goes
    (origin `model`). Without one, or on a TPU, a few steps are run and timed (origin `measured`).

    Args:
        model: A `Job`, a `Workload`, or any model that one takes; then the batch comes from
            `batch_size` and `sequence_length`, or from the data loader's first batch.
        dataloader: Yields batches; its own rate is measured for a few seconds.
        target_tflops: What is hoped for, over all devices.
        on: The slice to look at, which nobody needs to have rented.
        mesh: Sizes by axis name; by default all devices on the one axis "fsdp".
        measure: Whether to run steps; by default where no slice is named, and on a TPU.
        steps: Steps to time; the median counts.
        batch_size: For a model that is no workload.
        sequence_length: The same.
        options: Compiler options of the offline compile.
        timeout_s: For the offline compile.

    Raises:
        TPUModelError: There is no telling what the batch looks like.
        TPUValidationError: Neither a slice nor a measurement was asked for.
        XLACompilationError: The offline compiler refused the step or crashed.
    """
    if on is None and measure is False:
        raise TPUValidationError(
            "there is nothing to look at: name a slice to compile for, or leave out measure=False."
        )
    rate = None if dataloader is None else measure_input(dataloader)
    work = _workload(model, rate, batch_size, sequence_length)
    target = Slice.parse(on) if isinstance(on, str) else on
    here = detect_accelerators().kind == "tpu" if measure is None else measure
    timing = time_steps(work, mesh=mesh, steps=steps) if target is None or here else None
    compiled = prediction = None
    if target is not None:
        sizes = fill_mesh(mesh or {"fsdp": -1}, target)
        compiled = compile_for(
            work, target, mesh=sizes, options=options, until="schedule", timeout_s=timeout_s
        )
        prediction = _predict(compiled, work) if compiled.fits else None
    return _diagnose(work, target, timing, compiled, prediction, rate, target_tflops)


def time_steps(
    work: Workload, *, mesh: Mapping[str, int] | None = None, steps: int = STEPS
) -> StepTiming:
    """Run a few training steps on random batches and time them, compiling apart."""
    devices = jax.devices()
    sizes = dict(mesh or {"fsdp": len(devices) if work.examples % len(devices) == 0 else 1})
    count = 1
    for size in sizes.values():
        count *= size
    place = create_mesh(
        mesh_shape=tuple(sizes.values()), axis_names=tuple(sizes), devices=devices[:count]
    )
    batch = work.put_batch(place, work.example_batch())
    state = work.init_on(place, jax.random.key(0))
    started = time.perf_counter()
    compiled = work.jit_train_step(place).lower(state, batch).compile()
    compile_s = time.perf_counter() - started
    taken: list[float] = []
    for _ in range(WARM_UP_STEPS + steps):
        started = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        taken.append(time.perf_counter() - started)
    costs = compiled.cost_analysis() or {}
    flops = costs.get("flops", -1.0)
    return StepTiming(
        step_time_s=statistics.median(taken[WARM_UP_STEPS:]),
        compile_s=compile_s,
        flops=flops * count if flops > 0 else None,  # the compiler counts those of one device
        steps=steps,
        devices=f"{count} x {devices[0].device_kind}",
    )


def _workload(
    model: Any, rate: InputRate | None, batch_size: int | None, sequence_length: int | None
) -> Workload:
    """Build the step of the model, with the batch that was said or that the data loader yields."""
    if isinstance(model, Job):
        return build_step(model).work
    if isinstance(model, Workload) or (batch_size is not None and sequence_length is not None):
        job = Job(model=model, batch_size=batch_size, sequence_length=sequence_length)
        return build_step(job).work
    batch = None if rate is None else rate.batch
    if isinstance(batch, list | tuple) and len(batch) == 2:  # pyright: ignore[reportUnknownArgumentType]  any batch
        batch = dict(zip(("inputs", "targets"), batch, strict=True))
    if not isinstance(batch, Mapping):
        raise TPUModelError(
            "the shapes of a batch are not known; pass a Workload, batch_size and sequence_length, "
            "or a data loader that yields dicts or (inputs, targets)."
        )
    shapes = {
        str(name): jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))
        for name, value in batch.items()
    }
    first = next(iter(shapes.values()))
    tokens = first.ndim == 2 and jax.numpy.issubdtype(first.dtype, jax.numpy.integer)
    length = first.shape[1] if tokens else None
    job = Job(model=model, sequence_length=length).replace(parts={"batch": shapes})
    return build_step(job).work


def _predict(compiled: CompiledStep, work: Workload) -> StepPrediction:
    return compiled.predict(tokens_per_step=work.tokens_per_step, model_flops=_model_flops(work))


def _model_flops(work: Workload) -> float | None:
    if work.config is None or work.sequence_length is None or work.tokens_per_step is None:
        return None
    return work.config.flops_per_token(work.sequence_length).total * work.tokens_per_step


def _diagnose(
    work: Workload,
    target: Slice | None,
    timing: StepTiming | None,
    compiled: CompiledStep | None,
    prediction: StepPrediction | None,
    rate: InputRate | None,
    target_tflops: float | None,
) -> PerformanceDiagnosis:
    predicted = (
        Figure(prediction.step_time_s, "s", "model", "timeline of an offline compile")
        if prediction is not None
        else Figure.missing("s", NOT_COMPILED if target is None else "it does not fit")
    )
    step, compile_s = predicted, Figure.missing("s", NOT_RUN)
    if timing is not None:
        source = f"median of {timing.steps} steps on {timing.devices}"
        step = Figure(timing.step_time_s, "s", "measured", source)
        compile_s = Figure(timing.compile_s, "s", "measured", f"one compile on {timing.devices}")
    peak = (
        target.peak_tflops("bf16")
        if target is not None
        else Figure.missing("TFLOP/s", "no slice was named, and the catalog holds TPUs only")
    )
    achieved = _achieved(work, step, timing, prediction, target)
    shares = None if prediction is None else Bottlenecks.of(prediction)
    issues: list[PerformanceIssue] = [*target_issues(achieved, target_tflops, peak)]
    if compiled is not None:
        issues += memory_issues(compiled)
    if shares is not None and predicted.value is not None:
        issues += bottleneck_issues(shares, predicted.value)
    if rate is not None:
        issues += input_issues(rate, work.examples, step)
    issues += compile_issues(compile_s, step)
    notes = () if prediction is None else prediction.caveats
    why = "" if shares else "a step's length alone does not say why; name a slice to compile for"
    if target is not None and shares is None:
        why = "a program that does not fit has no timeline"
    return PerformanceDiagnosis(
        where=str(target) if target is not None else timing.devices if timing else "nowhere",
        step_time_s=step,
        predicted_step_s=predicted,
        compile_s=compile_s,
        achieved_tflops=achieved,
        target_tflops=target_tflops,
        peak_tflops=peak,
        bottlenecks=shares,
        no_bottlenecks=why,
        input_rate=rate,
        issues=tuple(sorted(issues, key=lambda issue: -issue.share)),
        notes=notes,
    )


def _achieved(
    work: Workload,
    step: Figure,
    timing: StepTiming | None,
    prediction: StepPrediction | None,
    target: Slice | None,
) -> Figure:
    """FLOP/s over all devices, by the best count of FLOPs there is."""
    if not step.value or step.origin is None:
        return Figure.missing("TFLOP/s", step.reason or NOT_RUN)
    flops, convention = _model_flops(work), "FLOPs of the model, causal attention counted once"
    if flops is None and timing is not None:
        flops, convention = timing.flops, "FLOPs of the program as the compiler counts them"
    elif flops is None and prediction is not None and target is not None:
        flops = prediction.hardware_flops * target.devices
        convention = "FLOPs of the program, recomputation included"
    if flops is None:
        return Figure.missing("TFLOP/s", "the compiler counts no FLOPs for this program")
    return Figure(flops / step.value / 1e12, "TFLOP/s", step.origin, convention)
