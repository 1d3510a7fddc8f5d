"""What decides which program a plan becomes: this package's source and what it stands on."""

import hashlib
from pathlib import Path

from ..runtime.versions import installed_versions

_ROOMS_OF_PROGRAMS = ("kernels", "models", "parallel", "step", "job")
_OTHER_FILES = (
    "compiler/program/lowered.py",
    "runtime/device_grid.py",
    "hardware/target.py",
)
_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "numpy")


def source_fingerprint() -> str:
    """A hash of the source that decides which program a plan becomes."""
    root = Path(__file__).parents[1]
    files = [root / name for name in _OTHER_FILES]
    for room in _ROOMS_OF_PROGRAMS:
        for kind in ("*.py", "*.toml", "*.json"):
            files += (root / room).rglob(kind)
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def package_versions() -> dict[str, str]:
    """The installed version of each package a program depends on."""
    return installed_versions(*_PACKAGES)
