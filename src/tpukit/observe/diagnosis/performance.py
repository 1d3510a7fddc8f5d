"""`diagnose_performance`: why training is slow, measured here or predicted for any slice."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from ...annotations import PyTree
from ...compiler import compile_for
from ...errors import TPUModelError, TPUValidationError
from ...hardware import Slice, detect_accelerators
from ...hardware.mesh_sizes import fill_mesh
from ...job.job import Job
from ...job.model_source import mean_of_first_output
from ...job.step import build_step
from ...models.loss import LossFunction, default_loss
from ...models.transformer.config import TransformerConfig
from ...plain_data import JsonMapping, JsonObject
from ...step.workload import Workload
from .evidence import STEPS, Evidence, InputRate, measure_input, time_steps
from .result import (
    PerformanceDiagnosis,
    PerformanceIssue,
    bottleneck_issues,
    compile_issues,
    input_issues,
    memory_issues,
    target_issues,
)

NO_TARGETS = (
    "the model has no known loss, so the mean of its first output is used; pass "
    "loss=…, or targets with the inputs."
)


def diagnose_performance(
    model: object,
    dataloader: Iterable[PyTree] | None = None,
    target_tflops: float | None = None,
    *,
    on: Slice | str | None = None,
    mesh: Mapping[str, int] | None = None,
    measure: bool | None = None,
    steps: int = STEPS,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    options: JsonMapping | None = None,
    timeout_s: float = 1800.0,
    **workload: Any,
) -> PerformanceDiagnosis:
    """Find what bounds a training step, and what to do about it.

    With a slice, the step is compiled for it offline and its predicted timeline shows where the
    time goes (origin `model`). Without a slice, or on a TPU, a few steps are run and timed (origin
    `measured`).

    Args:
        model: A `Job`, a `Workload`, or a model of any framework with an adapter; then the batch
            comes from `batch_size` and `sequence_length`, or from the data loader's first batch.
        dataloader: Yields batches: dicts, (inputs, targets), or plain arrays, which are inputs (of
            token numbers also the targets). Its own rate is measured for a few seconds.
        target_tflops: The desired TFLOP/s over all devices.
        on: The slice to compile for; no such slice is needed.
        mesh: Sizes by axis name; by default all devices on the one axis "fsdp".
        measure: Whether to run steps; by default where no slice is named, and on a TPU.
        steps: Steps to time; the median counts.
        batch_size: Of a model that is no `Workload`.
        sequence_length: Of a model that is no `Workload`.
        options: Compiler options of the offline compile.
        timeout_s: Seconds for the offline compile.
        **workload: Further keys of a `Job` (remat, train, …) or arguments of `Workload` (loss, …).

    Raises:
        TPUModelError: The shapes of a batch are not known.
        TPUValidationError: Neither a slice is named nor may steps be run.
        XLACompilationError: The offline compiler refused the step or crashed.
    """
    if on is None and measure is False:
        raise TPUValidationError(
            "there is nothing to diagnose: name a slice to compile for, or leave out measure=False."
        )
    rate = None if dataloader is None else measure_input(dataloader)
    shape = {"batch_size": batch_size, "sequence_length": sequence_length}
    given = {name: value for name, value in shape.items() if value is not None}
    stand_in = _StandInLoss()
    work = _workload(model, rate, {**workload, **given}, stand_in)
    target = Slice.parse(on) if isinstance(on, str) else on
    here = detect_accelerators().kind == "tpu" if measure is None else measure
    timing = time_steps(work, mesh=mesh, steps=steps) if target is None or here else None
    compiled = None
    if target is not None:
        sizes = fill_mesh(mesh or {"fsdp": -1}, target)
        compiled = compile_for(
            work, target, mesh=sizes, options=options, until="schedule", timeout_s=timeout_s
        )
    evidence = Evidence(work=work, target=target, timing=timing, compiled=compiled)
    issues = sorted(_issues(evidence, rate, target_tflops), key=lambda issue: -issue.share)
    return PerformanceDiagnosis(
        where=evidence.where,
        step_time_s=evidence.step_time_s,
        predicted_step_s=evidence.predicted_step_s,
        compile_s=evidence.compile_s,
        achieved_tflops=evidence.achieved_tflops,
        target_tflops=target_tflops,
        peak_tflops=evidence.peak_tflops,
        bottlenecks=evidence.bottlenecks,
        no_bottlenecks=evidence.no_bottlenecks,
        input_rate=rate,
        issues=tuple(issues),
        notes=(
            *(() if evidence.prediction is None else evidence.prediction.caveats),
            *((NO_TARGETS,) if stand_in.used else ()),
        ),
    )


class _StandInLoss:
    """The default loss where the outputs have one, else their mean; `used` is then true."""

    used = False

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        try:
            return default_loss(outputs, batch)
        except TPUModelError:
            self.used = True
            return mean_of_first_output(outputs, batch)


def _issues(
    evidence: Evidence, rate: InputRate | None, target_tflops: float | None
) -> Iterator[PerformanceIssue]:
    """Yield every issue that the evidence shows."""
    step, predicted = evidence.step_time_s, evidence.predicted_step_s.value
    shares = evidence.bottlenecks
    yield from target_issues(evidence.achieved_tflops, target_tflops, evidence.peak_tflops)
    if evidence.compiled is not None:
        yield from memory_issues(evidence.compiled)
    if shares is not None and predicted is not None:
        yield from bottleneck_issues(shares, predicted)
    if rate is not None:
        yield from input_issues(rate, evidence.work.examples, step)
    yield from compile_issues(evidence.compile_s, step)


def _workload(
    model: object, rate: InputRate | None, options: JsonMapping, stand_in: LossFunction
) -> Workload:
    """Build the step with the given batch shapes, else with those of the loader's first batch."""
    if isinstance(model, Job):
        return build_step(model.replace(options)).work
    sized = "batch" in options or {"batch_size", "sequence_length"} <= set(options)
    if sized or isinstance(model, Workload):
        return build_step(Job.of(model, **options)).work
    batch: Any = None if rate is None else rate.batch
    if hasattr(batch, "shape"):
        is_tokens = jax.numpy.issubdtype(batch.dtype, jax.numpy.integer)
        batch = {"inputs": batch, **({"targets": batch} if is_tokens else {})}
    elif isinstance(batch, list | tuple) and len(batch) == 2:  # pyright: ignore[reportUnknownArgumentType]  any batch
        batch = dict(zip(("inputs", "targets"), batch, strict=True))
    if not isinstance(batch, Mapping):
        raise TPUModelError(
            "the shapes of a batch are not known; pass a Workload, batch_size and sequence_length, "
            "or a data loader that yields dicts, (inputs, targets) or arrays."
        )
    shapes = {
        str(name): jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))
        for name, value in batch.items()
    }
    first = next(iter(shapes.values()))
    tokens = first.ndim == 2 and jax.numpy.issubdtype(first.dtype, jax.numpy.integer)
    length = first.shape[1] if tokens else None
    arguments: JsonObject = {"batch": shapes, "sequence_length": length}
    if not isinstance(model, str | TransformerConfig):  # which have a loss of their own
        arguments["loss"] = stand_in
    return build_step(Job.of(model, **{**arguments, **options})).work
