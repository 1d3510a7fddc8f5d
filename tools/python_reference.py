"""Write docs/reference.md: every public name of the package, for mkdocstrings to fill in."""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import get_origin

from tpukit.lazy import LAZY_PACKAGES

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
# Whose names load at once.
PLAIN_PACKAGES = (".kernels", ".hardware", ".compiler", ".errors")
HEAD = """# Python

Written by `make docs` from the lists of public names (`tools/python_reference.py`); a test
compares. The text is that of the docstrings. `import tpukit` loads neither jax nor torch: a name
loads what it needs when it is first used.
"""


def render() -> str:
    """The whole page: a heading a package, a line a name."""
    seen: set[str] = set()
    parts = [HEAD]
    for suffix in (*LAZY_PACKAGES, *PLAIN_PACKAGES):
        package = import_module(f"tpukit{suffix}")
        listed = getattr(package, "__all__", None) or _classes(package)
        homes = {name: _home(package, name) for name in sorted(listed)}
        new = {name: home for name, home in homes.items() if home and home not in seen}
        if not new:
            continue
        seen |= set(new.values())
        first = (package.__doc__ or "").strip().splitlines()[0]
        parts.append(f"## {package.__name__}\n\n{first}\n")
        parts += [f"::: {home}\n" for home in new.values()]
    return "\n".join(parts)


def _classes(module: ModuleType) -> list[str]:
    return [name for name, found in vars(module).items() if isinstance(found, type)]


def _home(package: ModuleType, name: str) -> str:
    """Where a class or function is written; "" of anything else."""
    found = getattr(package, name)
    if get_origin(found) is not None:  # an alias of types, which looks like what it was made of
        return ""
    module, own = getattr(found, "__module__", ""), getattr(found, "__qualname__", "")
    return f"{module}.{own}" if module.startswith("tpukit.") and own.isidentifier() else ""


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
