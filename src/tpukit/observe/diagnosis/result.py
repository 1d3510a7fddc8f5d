"""What a diagnosis gives back: figures, shares by bottleneck, issues and what to do."""

from dataclasses import dataclass
from typing import Any

from ...hardware import Figure
from ...runtime.mapped_result import MappedResult
from .evidence import CAUSES_BY_KIND, Bottlenecks
from .input_rate import InputRate
from .issues import PerformanceIssue


@dataclass(frozen=True, kw_only=True)
class PerformanceDiagnosis(MappedResult):
    """What was found. Reads like a mapping: `diagnosis["issues"]`, `diagnosis["compute_bound"]`.

    Attributes:
        where: The slice, or the devices of this process.
        step_time_s: Measured where steps were run, else predicted.
        predicted_step_s: From the timeline of an offline compile.
        achieved_tflops: Over all devices; its source says which FLOPs are counted.
        target_tflops: What was hoped for, over all devices.
        bottlenecks: None with `no_bottlenecks` saying why.
        issues: The costliest first.
    """

    where: str
    step_time_s: Figure
    predicted_step_s: Figure
    compile_s: Figure
    achieved_tflops: Figure
    target_tflops: float | None
    peak_tflops: Figure
    bottlenecks: Bottlenecks | None
    no_bottlenecks: str
    input_rate: InputRate | None
    issues: tuple[PerformanceIssue, ...]
    notes: tuple[str, ...] = ()

    @property
    def recommendations(self) -> list[str]:
        """What to do, the most useful first."""
        return [issue.solution for issue in self.issues]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; shares are fractions of the step, None when not known."""
        shares = self.bottlenecks
        return {
            "where": self.where,
            "step_time_s": self.step_time_s.to_dict(),
            "predicted_step_s": self.predicted_step_s.to_dict(),
            "compile_s": self.compile_s.to_dict(),
            "achieved_tflops": self.achieved_tflops.to_dict(),
            "target_tflops": self.target_tflops,
            "peak_tflops": self.peak_tflops.to_dict(),
            **{f"{kind}_bound": shares and getattr(shares, kind) for kind in CAUSES_BY_KIND},
            "bottleneck_origin": "model" if shares else None,
            "no_bottlenecks": self.no_bottlenecks,
            "input": None if self.input_rate is None else self.input_rate.to_dict(),
            "issues": [issue.to_dict() for issue in self.issues],
            "recommendations": self.recommendations,
            "notes": list(self.notes),
        }

    def __rich__(self) -> Any:
        """Figures, shares as bars, then the issues."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        figures = Table(box=None, show_header=False, pad_edge=False)
        for name, figure in (
            ("step", self.step_time_s),
            ("predicted step", self.predicted_step_s),
            ("compile", self.compile_s),
            ("achieved", self.achieved_tflops),
            ("peak", self.peak_tflops),
        ):
            if figure.value is not None:
                figures.add_row(name, f"{figure.value:.4g} {figure.unit}", figure.origin)
        if self.input_rate is not None and self.input_rate.samples_per_s is not None:
            rate = f"{self.input_rate.samples_per_s:,.0f} samples/s"
            figures.add_row("input alone", rate, "measured")
        shares = Table(box=None, show_header=False, pad_edge=False)
        for kind in CAUSES_BY_KIND if self.bottlenecks else ():
            share = getattr(self.bottlenecks, kind)
            shares.add_row(f"{kind} bound", f"{share:6.1%}", "█" * round(share * 40), "model")
        parts: list[Any] = [Text(f"performance on {self.where}", style="bold"), figures, shares]
        if self.no_bottlenecks:
            parts.append(Text(f"no shares: {self.no_bottlenecks}", style="dim"))
        for issue in self.issues:
            parts.append(Text.assemble((issue.problem, "yellow"), f": {issue.impact}"))
            parts.append(Text(f"  {issue.solution}"))
        if not self.issues:
            parts.append(Text("no issue found", style="green"))
        return Group(*parts, *[Text(f"note: {note}", style="dim") for note in self.notes])
