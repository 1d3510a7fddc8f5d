"""A quantization report as one page, with the bits of every matrix as a picture."""

from collections.abc import Sequence
from pathlib import Path

from ..pages.charts import BarPiece, stacked_bar
from ..pages.frame import Page
from ..pages.markup import Child, Markup
from ..pages.parts import Column, card, code, headline, section, table
from ..runtime.files import write_output
from .plan import SKIP
from .report import MatrixRow, QuantReport

_WIDEST = 16.0  # bits of what is left in bfloat16


def write_report(report: QuantReport, path: Path, *, title: str) -> Path:
    """Write the page.

    Raises:
        TPUValidationError: The place cannot be written.
    """
    write_output(path, render_report(report, title=title))
    return path


def render_report(report: QuantReport, *, title: str) -> str:
    """The page as text."""
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
    found = report.evaluation
    kept, kl = found.retention, found.kl
    size = f"{report.file_compression_ratio:.2f}× the whole model, against bfloat16"
    interval = f"{kept.low:.4f} … {kept.high:.4f}"
    cards = [
        card(f"{found.measure} kept".capitalize(), f"{kept.value:.4f}", interval, "measured"),
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
