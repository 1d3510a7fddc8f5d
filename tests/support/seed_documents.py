"""Code blocks of the five documents that tpukit was asked for in, where they lie at hand."""

import re
from dataclasses import dataclass
from pathlib import Path

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
_FENCE = re.compile(r"^ *```(\w*) *$")
_DIRECTIVE = re.compile(r"^\.\. code-block:: (\w+)$")
_UNDERLINE = re.compile(r"^[=~-]{3,}$")


@dataclass(frozen=True)
class Block:
    """One code block: the document's number, its ordinal there, the section it stands in."""

    document: str
    ordinal: int
    section: str
    language: str


def read_blocks(path: Path) -> list[Block]:
    """Every code block of a document in Markdown or reStructuredText, in order."""
    lines = path.read_text("utf-8").splitlines()
    document, section, inside = path.name[:3], "", False
    found: list[Block] = []
    for number, line in enumerate(lines):
        fence, directive = _FENCE.match(line), _DIRECTIVE.match(line)
        if fence and inside:
            inside = False
        elif fence or directive:
            inside = bool(fence)
            language = (fence or directive)[1] or "text"
            found.append(Block(document, len(found) + 1, section, language))
        elif not inside and line.startswith("#"):
            section = _plain(line)
        elif not inside and number and _UNDERLINE.match(line) and lines[number - 1].strip():
            section = _plain(lines[number - 1])
    return found


def _plain(heading: str) -> str:
    """A heading without marks of Markdown and pictures."""
    return re.sub(r"^[^\w\"]+", "", heading.strip("# ")).replace("*", "").strip()
