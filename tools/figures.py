"""Fill figures of README, CHANGELOG and docs from benchmarks/results; write docs/benchmarks.md.

    python tools/figures.py            rewrite what has changed
    python tools/figures.py --check    change nothing; exit 1 if something would change

A figure in a page is text between two comments, which name a result file and a key in it:
`<!--predict/median_error-->3.3 %<!--/-->`.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from harness import SAMPLES, Result, Run, all_figures  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks.md"
MARKED = re.compile(r"<!--([\w.-]+)/([\w.-]+)-->(.*?)<!--/-->")
HEAD = """# Benchmarks

`tools/figures.py` writes this page from `benchmarks/results`, one file per script: a benchmark that
runs to its end keeps its figures there. README and the other pages take their figures from the same
files. `make bench` runs a set of about five minutes first, `make bench RUN="commands plan"` other
scripts, `make bench RUN=all` every one (hours; some need a GPU). Figures were measured on a machine
with 2 cores unless their text names another one. *load* is the number of processes that wanted a
core; times on a busy machine are longer.

## Bars

| benchmark | figure | found | target | | date | load |
|---|---|---|---|---|---|---|
"""
FIGURES = """
## All figures

*model* is a predicted time, *compiler* a figure of the real compiler, *measured* one of our own
runs, *published* a run of others. *In sample* means that constants, or the choice of terms, were
fitted with the same rows in view.

| figure | of what | compares | | date | command |
|---|---|---|---|---|---|
"""


def figures() -> dict[tuple[str, str], tuple[Run, Result]]:
    """Return every kept figure by script and key."""
    return {(script, figure.name): (run, figure) for script, run, figure in all_figures()}


def pages() -> Iterator[Path]:
    """Yield every page that may state figures."""
    yield from (ROOT / "README.md", ROOT / "CHANGELOG.md")
    yield from sorted((ROOT / "docs").glob("*.md"))


def filled(text: str, known: dict[tuple[str, str], tuple[Run, Result]]) -> str:
    """Return a page with each marked figure as its result file has it.

    Raises:
        KeyError: A marker names a result that is not kept.
    """

    def fill(marker: re.Match[str]) -> str:
        script, key, _ = marker.groups()
        _, figure = known[script, key]
        return f"<!--{script}/{key}-->{figure.text}<!--/-->"

    return MARKED.sub(fill, text)


def bar_rows() -> list[tuple[str, ...]]:
    """Return every figure that has a bar, with its verdict."""
    return [
        (
            *(script, figure.what, figure.text, figure.target, figure.verdict),
            *(run.date, run.load),
        )
        for (script, _), (run, figure) in figures().items()
        if figure.target
    ]


def page() -> str:
    """Return docs/benchmarks.md."""
    rows = [
        (
            *(figure.text, figure.what, figure.compares, SAMPLES.get(figure.sample, "")),
            *(run.date, f"`{run.command}`"),
        )
        for run, figure in figures().values()
    ]
    return HEAD + _table(bar_rows()) + FIGURES + _table(rows)


def _table(rows: list[tuple[str, ...]]) -> str:
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def main(words: list[str]) -> int:
    """Rewrite the pages, or with `--check` only name those that would change."""
    known = figures()
    wanted = {path: filled(path.read_text("utf-8"), known) for path in pages() if path != PAGE}
    wanted[PAGE] = page()
    stale = [path for path, text in wanted.items() if path.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'differs from' if words else 'filled from'} results")
        if "--check" not in words:
            path.write_text(wanted[path], "utf-8")
    return int(bool(stale) and "--check" in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
