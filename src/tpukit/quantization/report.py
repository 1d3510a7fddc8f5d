"""`QuantReport`: what was made of a model, how large it is, and what it lost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..hardware.figure import Figure
from ..shown import Shown
from .measures.evaluation import Measured, QuantizationEvaluation
from .plan import SKIP, QuantPlan
from .search.tuning import TuningReport

# A ratio of sizes is against this: what one would serve otherwise.
BASELINE = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class MatrixRow(Shown):
    """One matrix of a report.

    Attributes:
        name: Of the matrix.
        shape: (inputs, outputs).
        format: What it is kept in; "skip" where it was left.
        nbytes: As it is kept.
        error: The relative error of its output, tr(ΔᵀHΔ) / tr(WᵀHW), on the calibration data,
            before any tuning; None where it was left.
        why: Why it was left.
    """

    name: str
    shape: tuple[int, int]
    format: str
    nbytes: int
    error: float | None
    why: str = ""

    @property
    def bits(self) -> float:
        """Bits a weight, with scales and codebook."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "format": self.format,
            "nbytes": self.nbytes,
            "bits": self.bits,
            "error": self.error,
            "why": self.why,
        }


@dataclass(frozen=True, kw_only=True)
class QuantReport(Shown):
    """What quantizing a model came to.

    Attributes:
        plan: The formats.
        matrices: One row each, in the order they are multiplied.
        refused: Parameters that cannot be quantized, and why.
        parameters: Of the whole model.
        stored_bytes: Of the whole model as it is kept now.
        evaluation: Measured on held-out data.
        generation: How likely the full model finds what the quantized one writes; None where the
            model does not generate, with `no_generation` saying why.
        speedup: Measured on an accelerator, or missing with a reason.
        calibration_rows: Rows of data that inputs were measured on.
        tuning: What training entries, scales and the rest did; None where there was none.
        target: The retention that was asked for.
        seconds: That it took.
    """

    plan: QuantPlan
    matrices: tuple[MatrixRow, ...]
    refused: Mapping[str, str]
    parameters: int
    stored_bytes: int
    evaluation: QuantizationEvaluation
    generation: Measured | None
    no_generation: str
    speedup: Figure
    calibration_rows: int
    tuning: TuningReport | None
    target: float | None
    seconds: float

    @property
    def compression_ratio(self) -> float:
        """Bytes of the quantized matrices in bfloat16, over what they take now; 1 with none."""
        return self._ratio()[0]

    @property
    def file_compression_ratio(self) -> float:
        """Bytes of the whole model in bfloat16, over what all of it takes now."""
        return 2 * self.parameters / max(1, self.stored_bytes)

    @property
    def bits_per_weight(self) -> float:
        """Mean bits of the quantized matrices' weights, scales and codebooks included."""
        return 16 / self._ratio()[0]

    def _ratio(self) -> tuple[float, int]:
        rows = [row for row in self.matrices if row.format != SKIP]
        weights = sum(row.shape[0] * row.shape[1] for row in rows)
        now = sum(row.nbytes for row in rows)
        return (2 * weights / now if now else 1.0), weights

    @property
    def accuracy_retention(self) -> float:
        """See `QuantizationEvaluation.retention`."""
        return self.evaluation.retention.value

    @property
    def reached(self) -> bool | None:
        """Whether the target lies below the whole interval of the retention; None without one."""
        return None if self.target is None else self.evaluation.retention.low >= self.target

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "compression_ratio": self.compression_ratio,
            "file_compression_ratio": self.file_compression_ratio,
            "bits_per_weight": self.bits_per_weight,
            "baseline": BASELINE,
            "parameters": self.parameters,
            "stored_bytes": self.stored_bytes,
            "accuracy_retention": self.accuracy_retention,
            "target": self.target,
            "reached": self.reached,
            "evaluation": self.evaluation.to_dict(),
            "generation_score": None if self.generation is None else self.generation.to_dict(),
            "no_generation": self.no_generation,
            "speedup": self.speedup.value,
            "speedup_origin": self.speedup.origin,
            "speedup_reason": self.speedup.reason or self.speedup.source,
            "calibration_rows": self.calibration_rows,
            "tuning": None if self.tuning is None else self.tuning.to_dict(),
            "seconds": self.seconds,
            "matrices": [row.to_dict() for row in self.matrices],
            "refused": dict(self.refused),
            "unused_rules": list(self.plan.unused_rules),
        }

    def facts(self) -> list[tuple[str, str]]:
        """Name and value of what matters most, for people."""
        found = self.evaluation
        facts = [
            (f"{found.measure} retention", found.retention.text()),
            ("KL, nats", found.kl.text() if found.kl else "– (outputs are no classes)"),
            ("same choice", found.agreement.text() if found.agreement else "–"),
            ("generation", self.generation.text() if self.generation else self.no_generation),
            ("bits a weight", f"{self.bits_per_weight:.2f} of the quantized matrices"),
            (
                "smaller than bfloat16",
                f"{self.compression_ratio:.2f}× those matrices, "
                f"{self.file_compression_ratio:.2f}× the whole model",
            ),
            ("speedup", _speed(self.speedup)),
            ("measured on", f"{found.rows} held-out rows, {found.places:,} places"),
        ]
        if self.tuning is not None:
            facts.append(("tuned, on calibration data it did not see", self.tuning.text()))
        if self.target is not None:
            facts.append(("target", f"{self.target:g}: {'reached' if self.reached else 'missed'}"))
        facts += [(f"rule {rule!r}", "matches no matrix") for rule in self.plan.unused_rules]
        return facts

    def __rich__(self) -> RenderableType:
        table = Table(show_header=False, title="quantized (95 % intervals, measured)")
        for name, value in self.facts():
            table.add_row(name, value)
        widest = max((len(row.name) for row in self.matrices), default=0)
        lines = Text("bits of each matrix\n")
        for row in self.matrices:
            bar = "█" * round(2 * min(row.bits, 16)) if row.format != SKIP else ""
            error = "" if row.error is None else f" error {row.error:.4f}"
            about = f"{row.bits:5.2f} {row.format}{error}" if row.format != SKIP else row.why
            lines.append(f"{row.name:<{widest}}  {bar}{' ' if bar else ''}{about}\n")
        return Group(table, lines)


def _speed(speedup: Figure) -> str:
    if speedup.value is None:
        return f"not measured: {speedup.reason}"
    return f"{speedup.value:.2f}× ({speedup.origin}: {speedup.source})"
