"""Loaded by Python before the user's program; prepares jax right after its import.

This file and the package beside it run in the user's process, with the user's Python and jax. They
import the standard library and jax, never tpukit.
"""

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterJax:
    """Finds jax as usual, and starts the capture when the import of jax has finished."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of jax with a loader that starts the capture; None for other modules."""
        if name != "jax":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                from tpukit_shim.start import (  # pyright: ignore[reportMissingImports]
                    start_from_environment,
                )

                start_from_environment()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_hidden_sitecustomize() -> None:
    """Run the sitecustomize of the user's own environment, which this file hides."""
    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("TPUKIT_CAPTURE"):
    from tpukit_shim.watching import watch_process  # pyright: ignore[reportMissingImports]

    watch_process()
    sys.meta_path.insert(0, _AfterJax())  # type: ignore[arg-type]
_run_hidden_sitecustomize()
