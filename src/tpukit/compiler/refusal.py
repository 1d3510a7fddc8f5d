"""What a failed compile means, from what the compiler said."""

import re

from ..errors import FlagError, TPUError, TPUOutOfMemoryError, XLACompilationError
from ..runtime.child import ChildError

_MEMORY = re.compile(r"\(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)")
_USED_OF = re.compile(r"[Uu]sed ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm")
_UNKNOWN_OPTION = re.compile(r"No such compile option: '?\"?([\w-]+)")


def ran_out_of_hbm(error: ChildError) -> bool:
    """Whether the compiler refused the program because it does not fit."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text and bool(_MEMORY.search(text) or _USED_OF.search(text))


def explain_failure(error: ChildError, name: str, target: object) -> TPUError:
    """The error a user is shown for what the child reported."""
    text = str(error)
    memory = _MEMORY.search(text) or _USED_OF.search(text)
    if ran_out_of_hbm(error) and memory:
        return TPUOutOfMemoryError(
            f"{name} does not fit on {target}: the compiler needs {memory[1]} of HBM per device "
            f"and has {memory[2]}. Use a smaller batch, more rematerialization, more sharding "
            'or a larger slice; compile_for(..., until="memory").memory says what takes it.'
        )
    unknown = _UNKNOWN_OPTION.search(text)
    if unknown:
        return FlagError(
            f"the TPU compiler does not know the option {unknown[1]!r}; "
            "`tpukit flags explain` finds the nearest one it knows."
        )
    first = next((line for line in text.splitlines() if line.strip()), "no message")
    return XLACompilationError(f"compiling {name} for {target} failed ({error.kind}): {first}")
