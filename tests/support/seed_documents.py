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


# What stands for each package of the documents.
PACKAGES = {
    "capibara.core.tpu": "tpukit",
    "capibara.jax.tpu_v4": "tpukit",
    "capibara.config": "tpukit",
    "kernel_pytorch.backends.tpu": "tpukit.torch",
    "kernel_pytorch.core": "tpukit.torch",
    "vishwamai.kernels.tpu": "tpukit.kernels",
    "optirs_tpu": "tpukit.pods",
    "optirs_core": "tpukit.pods",
}
_IMPORT = re.compile(r"^\s*from ([\w.]+) import \(?([^()]*?)(?:\)|$)", re.MULTILINE)
_OPEN_IMPORT = re.compile(r"^\s*from ([\w.]+) import \(([^)]*)\)", re.MULTILINE)
_USE = re.compile(r"^\s*use ([\w:]+)::(?:\{([^}]*)\}|(\w+));", re.MULTILINE)


def read_imports(path: Path) -> set[tuple[str, str]]:
    """(module of tpukit, name) for everything that a document imports from its own package."""
    text = re.sub(r"#[^\n]*", "", path.read_text("utf-8"))
    found: set[tuple[str, str]] = set()
    for module, names in [*_OPEN_IMPORT.findall(text), *_IMPORT.findall(text)]:
        found |= {(_ours(module), name) for name in re.findall(r"\w+", names)}
    for module, several, one in _USE.findall(text):
        names = re.findall(r"\w+", several or one)
        found |= {(_ours(module.replace("::", ".")), name) for name in names}
    return {(module, name) for module, name in found if module.startswith("tpukit")}


def _ours(module: str) -> str:
    for theirs, ours in PACKAGES.items():
        if module == theirs or module.startswith(f"{theirs}."):
            return ours + module.removeprefix(theirs)
    return module
