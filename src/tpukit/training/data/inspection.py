"""Statistics of a data set, counted token by token: the output of `tpukit data inspect`."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...errors import TPUValidationError
from ...pages.charts import BarPiece, stacked_bar
from ...pages.frame import Page
from ...pages.markup import Child, Markup
from ...pages.parts import Column, PageSection, card, code, headline, section, table
from ...runtime.files import write_output
from ...runtime.progress import Counted, Progress, silent
from ...shown import Shown
from .opening import open_tokens
from .token_store import TokenStore
from .tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

_CHUNK_TOKENS = 1 << 24
LARGEST_VOCABULARY = 1 << 24
_BAR_CELLS = 40


@dataclass(frozen=True)
class TokenCount:
    """How often a token occurs; `text` is None if the tokenizer is unknown."""

    token: int
    count: int
    text: str | None


@dataclass(frozen=True)
class LengthBin:
    """Documents of `shortest` to `longest` tokens."""

    shortest: int
    longest: int
    documents: int


@dataclass(frozen=True, kw_only=True)
class Inspection(Shown):
    """Statistics of a data set; None if unknown.

    Attributes:
        distinct_tokens: Number of different tokens that occur.
        unigram_entropy_nats: Entropy of the token counts, which is the loss of a model that
            predicts each token by its frequency; training must get below it.
        document_lengths: Histogram of document lengths, by powers of two.
        length_percentiles: Percentiles of document lengths, by percent.
        most_frequent: The most frequent tokens with their counts.
    """

    path: str
    kind: str
    dtype: str
    shards: int
    num_tokens: int
    num_documents: int | None
    smallest_token: int
    largest_token: int
    distinct_tokens: int
    unigram_entropy_nats: float
    tokenizer: str | None
    document_lengths: tuple[LengthBin, ...]
    length_percentiles: dict[int, int] | None
    most_frequent: tuple[TokenCount, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; every figure is measured."""
        return {"origin": "measured", **dataclasses.asdict(self)}

    def facts(self) -> dict[str, str]:
        """Return the figures as text, by name."""
        facts = {
            "tokens": f"{self.num_tokens:,} ({self.kind}, {self.dtype}, shards: {self.shards})",
            "token numbers": f"{self.smallest_token:,} to {self.largest_token:,}, "
            f"{self.distinct_tokens:,} of them in use",
            "unigram entropy": f"{self.unigram_entropy_nats:.4f} nats per token",
        }
        if self.num_documents is not None:
            facts["documents"] = f"{self.num_documents:,}"
        if self.length_percentiles is not None:
            facts["tokens per document"] = ", ".join(
                f"{percent} % ≤ {length:,}" for percent, length in self.length_percentiles.items()
            )
        if self.tokenizer is not None:
            facts["tokenizer"] = self.tokenizer
        return facts

    def __rich__(self) -> Group:
        table = Table(title=f"data: {self.path}", show_header=False, title_justify="left")
        for name, value in self.facts().items():
            table.add_row(name, value)
        parts: list[Table] = [table]
        if self.document_lengths:
            rows = [
                (f"{bin_.shortest:,}–{bin_.longest:,}", bin_.documents)
                for bin_ in self.document_lengths
            ]
            parts.append(_bars("documents by tokens", rows))
        frequent = [(label(entry), entry.count) for entry in self.most_frequent]
        parts.append(_bars("most frequent tokens", frequent))
        return Group(*parts)


def inspect_data(
    source: str | Path,
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    text_key: str = "text",
    dtype: str | None = None,
    top: int = 20,
    progress: Progress = silent,
) -> Inspection:
    """Read all tokens of a data set and count them.

    Args:
        source: See `open_data`.
        tokenizer: Tokenizes text, and shows tokens as text.
        text_key: The field with the text, for records with fields.
        dtype: Element type of .bin files.
        top: How many of the most frequent tokens to list.
        progress: Called from time to time with a `Counted` line of tokens.

    Raises:
        TPUValidationError: The data are missing, empty or damaged.
    """
    store = open_tokens(source, tokenizer=tokenizer, text_key=text_key, dtype=dtype)
    if store.num_tokens == 0:
        raise TPUValidationError(f"{store.path} contains no tokens; there is nothing to inspect.")
    counts = _count(store, progress)
    used = np.flatnonzero(counts)
    shares = counts[used] / store.num_tokens
    order = used[np.argsort(-counts[used], kind="stable")][:top]
    named = _tokenizer_of(store, tokenizer)
    return Inspection(
        path=store.path,
        kind=store.kind,
        dtype=store.dtype.name,
        shards=len(store.shards),
        num_tokens=store.num_tokens,
        num_documents=None if store.documents is None else len(store.documents) - 1,
        smallest_token=int(used[0]),
        largest_token=int(used[-1]),
        distinct_tokens=len(used),
        unigram_entropy_nats=float(-(shares * np.log(shares)).sum()),
        tokenizer=store.tokenizer.get("name"),
        document_lengths=_length_bins(store.documents),
        length_percentiles=_percentiles(store.documents),
        most_frequent=tuple(
            TokenCount(int(token), int(counts[token]), _text(named, int(token))) for token in order
        ),
    )


def label(entry: TokenCount) -> str:
    """Return a token as number and text."""
    return f"{entry.token}" if entry.text is None else f"{entry.token} {entry.text!r}"


def _count(store: TokenStore, progress: Progress) -> np.ndarray:
    """Count each token number, and verify the checksums of shards that have one."""
    expected = store.file_checksums
    counts = np.zeros(1, np.int64)
    done = 0
    for shard in store.shards:
        digest = hashlib.blake2b(digest_size=16)
        for start in range(0, shard.num_tokens, _CHUNK_TOKENS):
            stop = min(start + _CHUNK_TOKENS, shard.num_tokens)
            tokens = shard.read([(start, stop)])[0]
            digest.update(np.ascontiguousarray(tokens).tobytes())
            counts = _add(counts, tokens, shard.name)
            done += stop - start
            progress(Counted(f"{done:,} tokens", done=done, total=store.num_tokens))
        known = expected.get(shard.name.rsplit("/", 1)[-1])
        if known is not None and digest.hexdigest() != known:
            raise TPUValidationError(
                f"{shard.name} is corrupt: its checksum is {digest.hexdigest()}, but its manifest "
                f"has {known}; copy or prepare it again."
            )
    return counts


def _add(counts: np.ndarray, tokens: np.ndarray, name: str) -> np.ndarray:
    smallest, largest = int(tokens.min()), int(tokens.max())
    if smallest < 0 or largest >= LARGEST_VOCABULARY:
        raise TPUValidationError(
            f"{name} contains the token {smallest if smallest < 0 else largest}; expected 0 to "
            f"{LARGEST_VOCABULARY:,}. It is damaged, or its dtype is not {tokens.dtype.name}."
        )
    total = np.bincount(tokens, minlength=len(counts))
    total[: len(counts)] += counts
    return total


def _length_bins(documents: np.ndarray | None) -> tuple[LengthBin, ...]:
    if documents is None:
        return ()
    lengths = np.diff(documents)
    lengths = lengths[lengths > 0]
    counts = np.bincount(np.frexp(lengths.astype(float))[1] - 1)
    return tuple(
        LengthBin(1 << power, (2 << power) - 1, int(count))
        for power, count in enumerate(counts)
        if count or counts[:power].any()
    )


def _percentiles(documents: np.ndarray | None) -> dict[int, int] | None:
    if documents is None:
        return None
    percents = (10, 50, 90, 100)
    values = np.percentile(np.diff(documents), percents, method="inverted_cdf")
    return {percent: int(value) for percent, value in zip(percents, values, strict=True)}


def _tokenizer_of(store: TokenStore, tokenizer: str | Path | Tokenizer | None) -> Tokenizer | None:
    if tokenizer is not None:
        return load_tokenizer(tokenizer)
    return ByteTokenizer() if store.tokenizer.get("name") == "bytes" else None


def _text(tokenizer: Tokenizer | None, token: int) -> str | None:
    if tokenizer is None or token >= tokenizer.vocab_size:
        return None
    return "end of document" if token == tokenizer.end_of_document else tokenizer.decode([token])


def _bars(title: str, rows: Sequence[tuple[str, int]]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left", box=None)
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    most = max(count for _, count in rows)
    for name, count in rows:
        cells = round(_BAR_CELLS * count / most)
        table.add_row(Text(name), "█" * cells or ("▏" if count else ""), f"{count:,}")
    return table


_ORIGIN = "measured"


def write_inspection(inspection: Inspection, path: Path) -> Path:
    """Write the inspection as an HTML page.

    Raises:
        TPUValidationError: The path cannot be written.
    """
    write_output(path, render_inspection(inspection))
    return path


def render_inspection(inspection: Inspection) -> str:
    """Return the inspection as an HTML page."""
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


def _cards(inspection: Inspection) -> list[Markup]:
    documents = "–" if inspection.num_documents is None else f"{inspection.num_documents:,}"
    why = "their starts are unknown" if inspection.num_documents is None else ""
    typical = (inspection.length_percentiles or {}).get(50)
    entropy = f"{inspection.unigram_entropy_nats:.4f} nats"
    below = "per token: the loss of a model without context"
    numbers = f"from {inspection.smallest_token:,} to {inspection.largest_token:,}"
    return [
        card(
            "Tokens",
            f"{inspection.num_tokens:,}",
            f"{inspection.dtype}, shards: {inspection.shards}",
            _ORIGIN,
        ),
        card(
            "Documents",
            documents,
            why if typical is None else f"half have at most {typical:,} tokens",
            "" if why else _ORIGIN,
        ),
        card("Token numbers in use", f"{inspection.distinct_tokens:,}", numbers, _ORIGIN),
        card("Unigram entropy", entropy, below, _ORIGIN),
    ]


def _sections(inspection: Inspection) -> list[PageSection]:
    tokenizer = f"Tokenizer: {inspection.tokenizer}." if inspection.tokenizer is not None else ""
    shown = [section("Most frequent tokens", _frequent(inspection), intro=tokenizer)]
    if inspection.document_lengths:
        spread = f"Tokens per document: {inspection.facts()['tokens per document']}."
        shown.append(section("Document lengths", _lengths(inspection), intro=spread))
    return shown


def _frequent(inspection: Inspection) -> Markup:
    rows = [(code(label(entry)), entry.count) for entry in inspection.most_frequent]
    return _count_table(
        "token", "times", rows, total=inspection.num_tokens, caption="Tokens by count"
    )


def _lengths(inspection: Inspection) -> Markup:
    rows = [
        (f"{bin_.shortest:,}–{bin_.longest:,}", bin_.documents)
        for bin_ in inspection.document_lengths
    ]
    total = sum(count for _, count in rows)
    return _count_table("tokens", "documents", rows, total=total, caption="Documents by tokens")


def _count_table(
    name: str, what: str, rows: Sequence[tuple[Child, int]], *, total: int, caption: str
) -> Markup:
    """Return a table with a bar per count; the largest count fills the column."""
    most = max(count for _, count in rows)
    columns = (
        Column(name),
        Column("", is_bar=True),
        Column(what, is_number=True, origin=_ORIGIN),
        Column("share", is_number=True),
    )
    cells: list[Sequence[Child]] = []
    for key, count in rows:
        text = f"{count:,}"
        bar = stacked_bar([BarPiece("c-matrix", count, text)], whole=most, label=text)
        cells.append((key, bar, text, f"{count / total:.1%}"))
    return table(columns, cells, caption=caption)
