"""Where tpukit keeps what it can always make again: the one rule, and all that lies there."""

import os
from pathlib import Path
from typing import Literal

Kept = Literal["compiles", "errors", "fetched", "flags", "products", "tokens", "xla"]
"""What is kept: compiled programs, tracebacks of unexpected errors, data fetched for the moment,
registries of flags, timed products of cuBLAS, tokens made of text, and jax's own compilation
cache."""


def cache_folder(kept: Kept | None = None) -> Path:
    """The folder of one kind of thing, or the one above all; it need not exist.

    `TPUKIT_CACHE_DIR`, else `$XDG_CACHE_HOME/tpukit`, else `~/.cache/tpukit`.
    """
    if chosen := os.environ.get("TPUKIT_CACHE_DIR"):
        root = Path(chosen).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tpukit"
    return root if kept is None else root / kept
