"""`@conforms("000", 2, "…")`: a test that runs one code block of a document.

`docs/conformance.md` is written from a run of these cases by `make conformance`.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

conforms = pytest.mark.conforms

CASES = Path(__file__).parents[1] / "conformance"
PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
TITLES = {
    "000": "TPU module",
    "001": "TPU configuration",
    "002": "PyTorch backend",
    "003": "Kernels",
    "004": "Pods (Rust there, Python here)",
}
PASSED = "passes"


@dataclass(frozen=True, order=True)
class Case:
    """One row of the page.

    Attributes:
        block: Its ordinal in the document.
        test: `file::test` below tests/conformance.
    """

    document: str
    block: int
    feature: str
    test: str


def read_inventory() -> dict[tuple[str, int], tuple[str, str]]:
    """(language, section) of every code block of the documents, by document and ordinal."""
    rows = (line.split("\t") for line in (CASES / "blocks.tsv").read_text().splitlines())
    return {(document, int(block)): (kind, section) for document, block, kind, section in rows}


def list_cases() -> list[Case]:
    """Every marked test, read from the source: nothing is imported or run."""
    trees = {path.name: ast.parse(path.read_text()) for path in CASES.glob("test_0*.py")}
    return sorted(case for file, tree in trees.items() for case in _cases_of(tree, file))


def _cases_of(tree: ast.AST, file: str, prefix: str = "") -> Iterator[Case]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _cases_of(node, file, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and getattr(mark.func, "id", "") == "conforms":
                    document, block, feature = (ast.literal_eval(one) for one in mark.args)
                    yield Case(document, block, feature, f"{file}::{prefix}{node.name}")


def write_page(statuses: Mapping[str, str]) -> str:
    """The page's text.

    Args:
        statuses: What came of each test, by `Case.test`.
    """
    inventory, cases = read_inventory(), list_cases()
    passing = sum(statuses[case.test] == PASSED for case in cases)
    lines = [
        "# Conformance",
        "",
        "Every code block of the five documents that describe the system, run as a test in the",
        "document's own calls (`tests/conformance/`). Chips that are not here are the offline",
        "compiler, emulators or services on loopback; sizes are small. `make conformance` writes",
        f"this page from a run: {passing} of {len(cases)} cases pass, for {len(inventory)} blocks.",
    ]
    for document, title in TITLES.items():
        lines += ["", f"## {document}: {title}", "", "| section | feature | test | status |"]
        lines += ["|---|---|---|---|"]
        for case in cases:
            if case.document == document:
                _, section = inventory[document, case.block]
                shown = f"{section} (block {case.block})"
                test = case.test.split("::", 1)[1]
                lines.append(f"| {shown} | {case.feature} | `{test}` | {statuses[case.test]} |")
    return "\n".join(lines) + "\n"
