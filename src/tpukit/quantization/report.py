"""The report of a quantized model, as a table, JSON and a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..hardware.figure import Figure
from ..pages.charts import BarPiece, stacked_bar
from ..pages.frame import Page
from ..pages.markup import Child, Markup
from ..pages.parts import Column, card, code, headline, section, table
from ..plain_data import JsonObject
from ..runtime.files import write_output
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
        name: Name of the matrix.
        shape: (inputs, outputs).
        format: Its format; "skip" if it is not quantized.
        nbytes: Stored bytes.
        error: The relative error of its output, tr(ΔᵀHΔ) / tr(WᵀHW), on the calibration data,
            before any tuning; None if it is not quantized.
        why: The reason if it is not quantized.
    """

    name: str
    shape: tuple[int, int]
    format: str
    nbytes: int
    error: float | None
    why: str = ""

    @property
    def bits(self) -> float:
        """Bits per weight, with scales and codebook."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    def to_dict(self) -> JsonObject:
        """Return the fields as plain data."""
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
    """Sizes, formats, losses and speed of a quantized model.

    Attributes:
        plan: The format of every matrix.
        matrices: One row per matrix, in the order of the matmuls.
        refused: Parameters that cannot be quantized, with the reason.
        parameters: Number of parameters of the whole model.
        stored_bytes: Bytes of the whole quantized model.
        evaluation: Measured on held-out data.
        generation: Generation score (see `measures.evaluation`); None if the model does not
            generate, with the reason in `no_generation`.
        speedup: Measured on an accelerator, or missing with a reason.
        calibration_rows: Rows of calibration data.
        tuning: The report of the tuning, if any.
        target: The requested retention.
        seconds: Wall time.
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
        """Bytes of the quantized matrices in bfloat16 over their stored bytes; 1 without any."""
        return self._ratio()[0]

    @property
    def file_compression_ratio(self) -> float:
        """Bytes of the whole model in bfloat16 over its stored bytes."""
        return 2 * self.parameters / max(1, self.stored_bytes)

    @property
    def bits_per_weight(self) -> float:
        """Mean bits per weight of the quantized matrices, with scales and codebooks."""
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
        """Whether the lower end of the retention's interval reaches the target, if there is one."""
        return None if self.target is None else self.evaluation.retention.low >= self.target

    def to_dict(self) -> JsonObject:
        """Return the fields as plain data."""
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
        """Return names and values of the main figures, as text."""
        evaluation = self.evaluation
        facts = [
            (f"{evaluation.measure} retention", evaluation.retention.text()),
            ("KL, nats", evaluation.kl.text() if evaluation.kl else "– (outputs are no classes)"),
            ("same choice", evaluation.agreement.text() if evaluation.agreement else "–"),
            ("generation", self.generation.text() if self.generation else self.no_generation),
            ("bits a weight", f"{self.bits_per_weight:.2f} of the quantized matrices"),
            (
                "smaller than bfloat16",
                f"{self.compression_ratio:.2f}× those matrices, "
                f"{self.file_compression_ratio:.2f}× the whole model",
            ),
            ("speedup", _speed(self.speedup)),
            ("measured on", f"{evaluation.rows} held-out rows, {evaluation.places:,} places"),
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


_WIDEST = 16.0  # bits of what is left in bfloat16


def write_report(report: QuantReport, path: Path, *, title: str) -> Path:
    """Write the report as an HTML page.

    Raises:
        TPUValidationError: The file cannot be written.
    """
    write_output(path, render_report(report, title=title))
    return path


def render_report(report: QuantReport, *, title: str) -> str:
    """Return the HTML page."""
    facts = table(
        (Column("what"), Column("value")), report.facts(), caption="What was kept and what it takes"
    )
    sections = [
        section("Measures", facts, intro="95 % intervals by bootstrap over held-out rows."),
        section(
            "Bits of each matrix",
            _bits(report.matrices),
            intro="Scales and codebooks included, in the order the model multiplies them.",
        ),
    ]
    if report.refused:
        rows: list[Sequence[Child]] = [(code(p), why) for p, why in report.refused.items()]
        columns = (Column("parameter"), Column("why"))
        sections.append(
            section("Not quantizable", table(columns, rows, caption="Parameters left as they are"))
        )
    return Page(
        title=f"Quantized: {title}",
        headline=headline(
            title,
            f"({report.bits_per_weight:.2f} bits a weight)",
            lead="Every loss was measured on held-out data.",
            cards=_cards(report),
        ),
        sections=sections,
        footer="Made by tpukit quantize.",
    ).render()


def _cards(report: QuantReport) -> list[Markup]:
    evaluation = report.evaluation
    kept, kl = evaluation.retention, evaluation.kl
    size = f"{report.file_compression_ratio:.2f}× the whole model, against bfloat16"
    interval = f"{kept.low:.4f} … {kept.high:.4f}"
    cards = [
        card(f"{evaluation.measure} kept".capitalize(), f"{kept.value:.4f}", interval, "measured"),
        card("Smaller", f"{report.compression_ratio:.2f}×", size, "measured"),
    ]
    if kl is not None:
        about = f"nats, {kl.low:.4f} … {kl.high:.4f}"
        cards.append(card("KL divergence", f"{kl.value:.4f}", about, "measured"))
    return cards


def _bits(matrices: Sequence[MatrixRow]) -> Markup:
    columns = (
        Column("matrix"),
        Column("", is_bar=True),
        Column("bits", is_number=True),
        Column("format"),
        Column("output error", is_number=True, origin="measured"),
    )
    rows: list[Sequence[Child]] = []
    for row in matrices:
        left = row.format == SKIP
        words = f"{row.bits:.2f}"
        bar = stacked_bar(
            [BarPiece("c-overhead" if left else "c-matrix", min(row.bits, _WIDEST), words)],
            whole=_WIDEST,
            label=words,
        )
        error = "–" if row.error is None else f"{row.error:.4f}"
        rows.append((code(row.name), bar, words, row.why if left else row.format, error))
    return table(columns, rows, caption="Bits a weight, matrix by matrix")
