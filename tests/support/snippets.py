"""Code in the documents: every block with its page, its language, and whether a test runs it.

A line `<!-- run: python -->` above a block says that it runs, in one namespace a page, in an empty
folder; `<!-- run: shell -->` that its lines are commands; `<!-- run: file NAME -->` that it is a
file for those.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- run: (?P<run>[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
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
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            found["code"],
            found["run"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


ALL = [one for page in PAGES for one in snippets(page)]
