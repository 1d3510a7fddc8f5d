"""Code in the documents: every block with its page, its language, and whether a test runs it.

A line above a block says what becomes of it:

    <!-- run: python -->                  it runs, in one namespace a page, in an empty folder
    <!-- run: python slow -->             the same, in the slow tests: over 1.5 s of processor time
    <!-- run: python; 10_000 is 2 -->     it runs with 2 where a reader sees 10_000
    <!-- run: shell -->                   its lines are commands
    <!-- run: file NAME -->               it is a file for those commands
    <!-- run: no, REASON -->              it cannot run on one machine

What a page takes for granted stands in a comment, `<!-- run: setup … -->` (`setup slow` before what
is slow), and so may what is true after a block.
"""

import contextlib
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"^<!-- run: setup(?P<slow> slow)?\n(?P<setup>.*?)^-->$"
    r"|(?:^<!-- run: (?P<run>[^>\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    """A block of code.

    Attributes:
        line: Where it begins.
        run: What stands above it: "python", "python slow; 10_000 is 2", "shell", "file NAME",
            "no, REASON", or "" where nothing does.
    """

    page: str
    line: int
    language: str
    code: str
    run: str

    @property
    def kind(self):
        """The first word of `run`."""
        return re.split("[ ,;]", self.run)[0]

    @property
    def slow(self):
        """Whether it waits for the slow tests."""
        return self.run.partition(";")[0] == "python slow"

    @property
    def program(self):
        """What is run: the code, with what `run` says is something else here."""
        code = self.code
        for swap in self.run.split("; ")[1:]:
            shown, found, here = swap.partition(" is ")
            assert found, f"{self.page}:{self.line}: {swap!r} is not 'SHOWN is HERE'"
            assert shown in code, f"{self.page}:{self.line}: nothing says {shown!r}"
            code = code.replace(shown, here)
        return code


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
            f"python{found['slow'] or ''}" if found["setup"] else found["run"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


ALL = [one for page in PAGES for one in snippets(page)]


def run_python(page, *, slow):
    """Run the blocks of a page in order, where this process stands; the slow ones if asked to."""
    names = {"__name__": "__main__"}
    for one in ALL:
        if one.page == page and one.kind == "python" and (slow or not one.slow):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(one.program, f"{one.page}:{one.line}", "exec"), names)


if __name__ == "__main__":
    run_python(sys.argv[1], slow=True)
