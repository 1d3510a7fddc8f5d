"""A spare interpreter: it has imported a job's modules, and becomes its process on order.

Importing jax, orbax and grain takes most of the time between a kill and the next step. jax reads
environment variables on import, so the order's variables are set in jax's configuration.
"""

import contextlib
import json
import os
import runpy
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

READY = "spare ready"


def main(modules: list[str]) -> None:
    """Import modules, wait for an order, and run its module like `python -m`."""
    for module in modules:
        # Modules that are not installed are not needed.
        with contextlib.suppress(ModuleNotFoundError):
            import_module(module)
    sys.stderr.write(f"{READY}\n")
    sys.stderr.flush()
    received = sys.stdin.buffer.read()
    if not received:
        return  # never needed
    order: dict[str, Any] = json.loads(received)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _, _, module, *arguments = order["argv"]
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    configure_jax(order["environment"])
    sys.path[0] = order["folder"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def configure_jax(environment: Mapping[str, str]) -> None:
    """Set jax's options to the variables that it would have read on import."""
    if "jax" not in sys.modules:
        return
    import jax

    options: Mapping[str, Any] = jax.config.values  # pyright: ignore[reportAttributeAccessIssue]  made at run time
    for name, value in environment.items():
        option = name.lower()
        if name.startswith("JAX_") and option in options:
            jax.config.update(option, _like(options[option], value))


def _like(current: object, text: str) -> object:
    """Return the text as the type of the option's value."""
    if isinstance(current, bool):
        return text.lower() in ("1", "true", "t", "yes", "y", "on")
    return type(current)(text) if isinstance(current, int | float) else text


if __name__ == "__main__":
    main(sys.argv[1:])
