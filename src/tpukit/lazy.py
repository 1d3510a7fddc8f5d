"""Public names that load on first use, from one list per package, with stubs for type checkers.

A package calls `lazy_names` with its list. `make format` writes the stubs (`__init__.pyi`); a test
fails if they are out of date.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

# Public names by the module they live in, e.g. {".mesh.mesh": ("create_mesh",)}.
Homes = Mapping[str, Sequence[str]]
LAZY_PACKAGES = (
    *("", ".parallel", ".models", ".step", ".job", ".records", ".training", ".observe", ".torch"),
    *(".quantization", ".pods", ".pods.spot"),
)


def lazy_names(
    package: str, homes: Homes
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose names load on first use."""
    home_of = {name: module for module, names in homes.items() for name in names}
    names = sorted(home_of)

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: names, names


def stub_of(homes: Homes) -> str:
    """Return the stub text that declares the names in `homes` for type checkers."""
    pairs = sorted((module, name) for module, names in homes.items() for name in names)
    lines = [f"from {module} import {name} as {name}" for module, name in pairs]
    listed = "".join(f'    "{name}",\n' for name in sorted(name for _, name in pairs))
    header = "# Written by `make format` from the list in __init__.py."
    return "\n".join([header, "", *lines, "", f"__all__ = [\n{listed}]", ""])


def stub_path(package: str) -> Path:
    """Return the path of a package's stub."""
    module = import_module(f"tpukit{package}")
    return Path(module.__file__ or "").with_suffix(".pyi")


def write_stubs() -> None:
    """Write every stub."""
    for package in LAZY_PACKAGES:
        homes: Homes = import_module(f"tpukit{package}").HOMES
        extra = "\n__version__: str\n" if not package else ""
        stub_path(package).write_text(stub_of(homes) + extra)
