"""The figures of a diagnosed step, each from the best source there is, and what bounds it."""

from dataclasses import dataclass, replace
from functools import cached_property

from ...compiler import CompiledStep
from ...compiler.timeline import StepPrediction
from ...hardware import Figure, Slice, peak_of_products
from ...models.transformer.config import operand_format
from ...step.traced_flops import model_flops
from ...step.workload import Workload
from .step_timing import StepTiming

# What bounds a step, by the causes that a timeline tells apart.
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
        """The shares of a predicted step."""
        whole = sum(prediction.seconds_by_cause.values()) or 1.0
        return cls(
            **{
                kind: sum(prediction.seconds_by_cause.get(cause, 0.0) for cause in causes) / whole
                for kind, causes in CAUSES_BY_KIND.items()
            }
        )


NOT_RUN = "no step was run"
NOT_COMPILED = "no slice was named to compile for"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was run and compiled for one diagnosis.

    Attributes:
        target: The slice to look at, or None where only this machine was.
        timing: Steps that were run here.
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
        """The timeline of the compiled step; a program that does not fit has none."""
        if self.compiled is None or not self.compiled.fits:
            return None
        return self.compiled.predict(
            tokens_per_step=self.work.tokens_per_step, model_flops=self._model_flops.value
        )

    @property
    def predicted_step_s(self) -> Figure:
        """The step by its timeline."""
        if self.prediction is None:
            return Figure.missing("s", NOT_COMPILED if self.target is None else "it does not fit")
        return Figure(self.prediction.step_time_s, "s", "model", "timeline of an offline compile")

    @property
    def step_time_s(self) -> Figure:
        """The step as measured, where it was run; else as predicted."""
        if self.timing is None:
            return self.predicted_step_s
        source = f"median of {self.timing.steps} steps on {self.timing.devices}"
        return Figure(self.timing.step_time_s, "s", "measured", source)

    @property
    def compile_s(self) -> Figure:
        """Compiling the step where it was run."""
        if self.timing is None:
            return Figure.missing("s", NOT_RUN)
        source = f"one compile on {self.timing.devices}"
        return Figure(self.timing.compile_s, "s", "measured", source)

    @property
    def peak_tflops(self) -> Figure:
        """The peak of the whole slice."""
        if self.target is None:
            reason = "no slice was named, and the catalog holds TPUs only"
            return Figure.missing("TFLOP/s", reason)
        config = self.work.config
        formats = () if config is None else (operand_format(config.matmul),)
        return self.target.peak_tflops(peak_of_products(self.target.chip, formats))

    @property
    def achieved_tflops(self) -> Figure:
        """TFLOP/s over all devices, by the best count of FLOPs there is; the source says which."""
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
        found = Figure.derived(flops.value / step.value / 1e12, "TFLOP/s", inputs=(flops, step))
        return replace(found, source=counted)

    @property
    def bottlenecks(self) -> Bottlenecks | None:
        """What bounds the predicted step."""
        return None if self.prediction is None else Bottlenecks.of(self.prediction)

    @property
    def no_bottlenecks(self) -> str:
        """Why there are none, or ""."""
        if self.prediction is not None:
            return ""
        if self.target is not None:
            return "a program that does not fit has no timeline"
        return "a step's length alone does not say why; name a slice to compile for"

    @property
    def _model_flops(self) -> Figure:
        return model_flops(self.work)
