"""An inspection as one page."""

from collections.abc import Sequence
from pathlib import Path

from ...pages.charts import BarPiece, stacked_bar
from ...pages.frame import Page
from ...pages.markup import Child, Markup
from ...pages.parts import Column, PageSection, card, code, headline, section, table
from ...runtime.files import write_output
from .inspection import Inspection, label

_ORIGIN = "measured"


def write_inspection(inspection: Inspection, path: Path) -> Path:
    """Write the page.

    Raises:
        TPUValidationError: The place cannot be written.
    """
    write_output(path, render_inspection(inspection))
    return path


def render_inspection(inspection: Inspection) -> str:
    """The page as text."""
    return Page(
        title=f"Data: {inspection.path}",
        headline=headline(
            inspection.path,
            f"({inspection.kind})",
            lead="Every figure was counted from the data.",
            cards=_cards(inspection),
        ),
        sections=_sections(inspection),
        footer="Made by tpukit data inspect.",
    ).render()


def _cards(found: Inspection) -> list[Markup]:
    documents = "–" if found.num_documents is None else f"{found.num_documents:,}"
    why = "where they start is not known" if found.num_documents is None else ""
    typical = (found.length_percentiles or {}).get(50)
    entropy = f"{found.unigram_entropy_nats:.4f} nats"
    below = "a token: the loss of a model that knows no order"
    numbers = f"from {found.smallest_token:,} to {found.largest_token:,}"
    return [
        card("Tokens", f"{found.num_tokens:,}", f"{found.dtype}, shards: {found.shards}", _ORIGIN),
        card(
            "Documents",
            documents,
            why if typical is None else f"half have at most {typical:,} tokens",
            "" if why else _ORIGIN,
        ),
        card("Token numbers in use", f"{found.distinct_tokens:,}", numbers, _ORIGIN),
        card("Unigram entropy", entropy, below, _ORIGIN),
    ]


def _sections(found: Inspection) -> list[PageSection]:
    tokenizer = f"Tokenizer: {found.tokenizer}." if found.tokenizer is not None else ""
    shown = [section("Most frequent tokens", _frequent(found), intro=tokenizer)]
    if found.document_lengths:
        spread = f"Tokens a document: {found.facts()['tokens a document']}."
        shown.append(section("Document lengths", _lengths(found), intro=spread))
    return shown


def _frequent(found: Inspection) -> Markup:
    rows = [(code(label(one)), one.count) for one in found.most_frequent]
    return _bars("token", "times", rows, whole=found.num_tokens, caption="Tokens by count")


def _lengths(found: Inspection) -> Markup:
    rows = [(f"{one.shortest:,}–{one.longest:,}", one.documents) for one in found.document_lengths]
    whole = sum(count for _, count in rows)
    return _bars("tokens", "documents", rows, whole=whole, caption="Documents by tokens")


def _bars(
    name: str, what: str, rows: Sequence[tuple[Child, int]], *, whole: int, caption: str
) -> Markup:
    """A table with a bar for each count, the longest as wide as there is room."""
    most = max(count for _, count in rows)
    columns = (
        Column(name),
        Column("", is_bar=True),
        Column(what, is_number=True, origin=_ORIGIN),
        Column("share", is_number=True),
    )
    cells: list[Sequence[Child]] = []
    for key, count in rows:
        words = f"{count:,}"
        bar = stacked_bar([BarPiece("c-matrix", count, words)], whole=most, label=words)
        cells.append((key, bar, words, f"{count / whole:.1%}"))
    return table(columns, cells, caption=caption)
