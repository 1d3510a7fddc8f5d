"""Code in the documents: every block with its page, its language, and whether a test runs it.

A line `<!-- run: python -->` above a block says that it runs, in one namespace a page, in an empty
folder; `<!-- run: shell -->` that its lines are commands; `<!-- run: file NAME -->` that it is a
file for those. What a page takes for granted stands in a comment, `<!-- run: setup … -->`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"^<!-- run: setup\n(?P<setup>.*?)^-->$"
    r"|(?:^<!-- run: (?P<run>[^>\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    """A block of code.

    Attributes:
        run: "python", "shell", "file NAME", or "" where no test runs it.
        line: Where it begins.
    """

    page: str
    line: int
    language: str
    code: str
    run: str


def snippets(page):
    """Every block of a page, in order."""
    text = page.read_text("utf-8")
    name = str(page.relative_to(ROOT))
    return [
        Snippet(
            name,
            text.count("\n", 0, max(found.start("code"), found.start("setup"))) + 1,
            "python" if found["setup"] else found["language"],
            found["setup"] or found["code"],
            "python" if found["setup"] else found["run"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


ALL = [one for page in PAGES for one in snippets(page)]
