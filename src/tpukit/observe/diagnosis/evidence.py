"""The evidence of a diagnosis: timed steps, the input rate, the compiled step, their figures."""

import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from ...annotations import PyTree
from ...compiler import CompiledStep
from ...compiler.timeline import StepPrediction
from ...errors import TPUValidationError
from ...hardware import Figure, Slice, peak_of_products
from ...models.transformer.config import operand_format
from ...parallel.mesh.mesh import create_mesh
from ...shown import Shown
from ...step.traced_flops import model_flops, traced_flops
from ...step.workload import Workload

STEPS, WARM_UP_STEPS = 5, 2


@dataclass(frozen=True)
class StepTiming:
    """A few steps timed on the devices of this process.

    Attributes:
        flops: FLOPs of the traced step over all devices.
    """

    step_time_s: float
    compile_s: float
    flops: Figure
    steps: int
    devices: str


def time_steps(
    work: Workload, *, mesh: Mapping[str, int] | None = None, steps: int = STEPS
) -> StepTiming:
    """Run a few training steps on random batches, and time them and the compile."""
    devices = jax.devices()
    sizes = dict(mesh or {"fsdp": len(devices) if work.examples % len(devices) == 0 else 1})
    count = math.prod(sizes.values())
    place = create_mesh(
        mesh_shape=tuple(sizes.values()), axis_names=tuple(sizes), devices=devices[:count]
    )
    batch = work.put_batch(place, work.example_batch())
    state = work.init_on(place, jax.random.key(0))
    started = time.perf_counter()
    traced = work.jit_train_step(place).trace(state, batch)
    compiled = traced.lower().compile()
    compile_s = time.perf_counter() - started
    taken: list[float] = []
    for _ in range(WARM_UP_STEPS + steps):
        started = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        taken.append(time.perf_counter() - started)
    return StepTiming(
        step_time_s=statistics.median(taken[WARM_UP_STEPS:]),
        compile_s=compile_s,
        flops=traced_flops(traced.jaxpr.jaxpr),
        steps=steps,
        devices=f"{count} x {devices[0].device_kind}",
    )


BATCHES, SECONDS = 50, 5.0


@dataclass(frozen=True, kw_only=True)
class InputRate(Shown):
    """The rate of a data loader on its own; origin `measured`.

    Attributes:
        samples_per_s: Samples per second after the first batch; None with `reason`.
        first_batch_s: Seconds to the first batch, which may start workers or fill a buffer.
        batch: The first batch.
    """

    samples_per_s: float | None
    batches: int
    seconds: float
    first_batch_s: float
    samples_per_batch: int
    reason: str = ""
    batch: PyTree = field(default=None, repr=False, compare=False)
    origin = "measured"
    _facts = (
        "origin",
        "samples_per_s",
        "batches",
        "seconds",
        "first_batch_s",
        "samples_per_batch",
        "reason",
    )


def measure_input(
    dataloader: Iterable[PyTree], *, batches: int = BATCHES, seconds: float = SECONDS
) -> InputRate:
    """Draw batches up to two limits, and return how fast they came.

    The limits are checked between batches. Batches that were drawn are lost to the caller.

    Raises:
        TPUValidationError: It cannot be iterated, is empty, or its batches contain no arrays.
    """
    try:
        source = iter(dataloader)
    except TypeError:
        raise TPUValidationError(
            f"a {type(dataloader).__name__} is no data loader; pass something that yields batches."
        ) from None
    started = time.perf_counter()
    first = next(source, None)
    if first is None:
        raise TPUValidationError("the data loader is empty; pass one that yields batches.")
    first_s = time.perf_counter() - started
    size = _examples(first)
    drawn = samples = 0
    began = time.perf_counter()
    while drawn < batches and time.perf_counter() - began < seconds:
        batch = next(source, None)
        if batch is None:
            break
        drawn += 1
        samples += _examples(batch)
    took = time.perf_counter() - began
    rate = samples / took if drawn and took > 0 else None
    return InputRate(
        samples_per_s=rate,
        batches=drawn + 1,
        seconds=first_s + took,
        first_batch_s=first_s,
        samples_per_batch=size,
        reason="" if rate is not None else "it ended after one batch",
        batch=first,
    )


def _examples(batch: PyTree) -> int:
    """Return the examples in a batch: the first dimension of its first array."""
    values: list[Any] = [batch]
    while values:
        value = values.pop(0)
        shape = getattr(value, "shape", None)
        if shape:
            return int(shape[0])
        if isinstance(value, Mapping):
            values[:0] = list(value.values())  # pyright: ignore[reportUnknownArgumentType]  any batch
        elif isinstance(value, list | tuple):
            values[:0] = list(value)  # pyright: ignore[reportUnknownArgumentType]  any batch
    raise TPUValidationError(
        f"a batch of the data loader is a {type(batch).__name__} without arrays; its arrays must "
        "start with the batch dimension."
    )


# Kinds of bottleneck, with the timeline causes that belong to each.
CAUSES_BY_KIND = {
    "compute": ("matrix", "kernel", "vector"),
    "memory": ("hbm",),
    "communication": ("ici", "dcn"),
    "host": ("host",),
    "overhead": ("overhead",),
}


@dataclass(frozen=True)
class Bottlenecks:
    """Shares of a predicted step by what bounds it; they add up to one. Origin `model`."""

    compute: float
    memory: float
    communication: float
    host: float
    overhead: float

    @classmethod
    def of(cls, prediction: StepPrediction) -> "Bottlenecks":
        """Return the shares of a predicted step."""
        total = sum(prediction.seconds_by_cause.values()) or 1.0
        return cls(
            **{
                kind: sum(prediction.seconds_by_cause.get(cause, 0.0) for cause in causes) / total
                for kind, causes in CAUSES_BY_KIND.items()
            }
        )


NOT_RUN = "no step was run"
NOT_COMPILED = "no slice was named to compile for"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The timed and the compiled step of one diagnosis.

    Attributes:
        target: The slice to diagnose, or None for this machine alone.
        timing: Steps that were run on this machine.
        compiled: The step, compiled for `target`.
    """

    work: Workload
    target: Slice | None
    timing: StepTiming | None
    compiled: CompiledStep | None

    @property
    def where(self) -> str:
        """The slice, or the devices of this process."""
        if self.target is not None:
            return str(self.target)
        return "nowhere" if self.timing is None else self.timing.devices

    @cached_property
    def prediction(self) -> StepPrediction | None:
        """The predicted timeline of the compiled step; None where the program does not fit."""
        if self.compiled is None or not self.compiled.fits:
            return None
        return self.compiled.predict(
            tokens_per_step=self.work.tokens_per_step, model_flops=self._model_flops.value
        )

    @property
    def predicted_step_s(self) -> Figure:
        """The step time by the predicted timeline."""
        if self.prediction is None:
            return Figure.missing("s", NOT_COMPILED if self.target is None else "it does not fit")
        return Figure(self.prediction.step_time_s, "s", "model", "timeline of an offline compile")

    @property
    def step_time_s(self) -> Figure:
        """The measured step time where steps were run, else the predicted one."""
        if self.timing is None:
            return self.predicted_step_s
        source = f"median of {self.timing.steps} steps on {self.timing.devices}"
        return Figure(self.timing.step_time_s, "s", "measured", source)

    @property
    def compile_s(self) -> Figure:
        """The measured compile time, where steps were run."""
        if self.timing is None:
            return Figure.missing("s", NOT_RUN)
        source = f"one compile on {self.timing.devices}"
        return Figure(self.timing.compile_s, "s", "measured", source)

    @property
    def peak_tflops(self) -> Figure:
        """The peak FLOP rate of the slice."""
        if self.target is None:
            reason = "no slice was named, and the catalog has TPUs only"
            return Figure.missing("TFLOP/s", reason)
        config = self.work.config
        formats = () if config is None else (operand_format(config.matmul),)
        return self.target.peak_tflops(peak_of_products(self.target.chip, formats))

    @property
    def achieved_tflops(self) -> Figure:
        """TFLOP/s over all devices; the source names which FLOPs are counted."""
        step = self.step_time_s
        if not step.value:
            return Figure.missing("TFLOP/s", step.reason or NOT_RUN)
        flops, counted = self._model_flops, "FLOPs of the model, causal attention counted once"
        if flops.value is None and self.timing is not None:
            flops, counted = self.timing.flops, "FLOPs of the program, recomputation included"
        elif flops.value is None and self.prediction is not None and self.target is not None:
            flops = self.prediction.hardware_flops.scaled(self.target.devices)
            counted = "FLOPs of the program, recomputation included"
        if flops.value is None:
            return Figure.missing("TFLOP/s", flops.reason)
        figure = Figure.derived(flops.value / step.value / 1e12, "TFLOP/s", inputs=(flops, step))
        return replace(figure, source=counted)

    @property
    def bottlenecks(self) -> Bottlenecks | None:
        """Shares of the predicted step by bottleneck."""
        return None if self.prediction is None else Bottlenecks.of(self.prediction)

    @property
    def no_bottlenecks(self) -> str:
        """Why there are no shares, or ""."""
        if self.prediction is not None:
            return ""
        if self.target is not None:
            return "a program that does not fit has no timeline"
        return "step times alone do not show what bounds a step; name a slice to compile for"

    @property
    def _model_flops(self) -> Figure:
        return model_flops(self.work)
