"""What the TPU compiler's own errors mean, in a sentence with their figures."""

import re

from ..errors import FlagError, TPUError, TPUOutOfMemoryError, XLACompilationError
from ..hardware import Slice
from ..hardware.figure import bytes_text
from ..runtime.child import ChildError
from ..runtime.versions import installed_versions

_SIZE = r"([\d.]+[KMGT]?)"
_HBM = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"[Uu]sed {_SIZE} of {_SIZE} hbm"),
)
# The compiler has three words for a kernel that does not fit, depending on which of its parts
# finds out; the second does not say in its first line how much that is.
_VMEM = (
    re.compile(rf"[Uu]sed {_SIZE} of {_SIZE} vmem"),
    re.compile(rf"[Ss]coped allocation with size {_SIZE} and limit {_SIZE} exceeded scoped vmem"),
    re.compile(rf"Allocation \(size={_SIZE}\) would exceed memory \(size={_SIZE}\)[^\n]*=\s*vmem"),
)
_RAN_OUT_OF_VMEM = re.compile(r"RESOURCE_EXHAUSTED[\s\S]*(?:memory space vmem|[Vv]memOom|=\s*vmem)")
_LARGEST = re.compile(r"tag = '(\w+) window[^']*?window shape is ([a-z0-9]+\[[\d,]*\])")
# A program of a newer jax: its operations, or those of its kernels, are not known here.
_UNREADABLE = re.compile(
    r"Failed to deserialize StableHLO|unsupported (?:Mosaic|serde) version", re.I
)
_UNKNOWN_OPTION = re.compile(r"No such compile option: '?\"?([\w-]+)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def ran_out_of_hbm(error: ChildError) -> bool:
    """Whether the compiler refused the program because it does not fit."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text and _sizes(_HBM, text) is not None


def explain_failure(
    error: ChildError, name: str, target: Slice, *, exported_by: str = ""
) -> TPUError:
    """The error a user is shown for what the child reported.

    Args:
        error: What the child reported.
        name: Of the program.
        target: The slice.
        exported_by: The version of jax that exported the program; "" for the running one.
    """
    text = str(error)
    hbm = _sizes(_HBM, text)
    if ran_out_of_hbm(error) and hbm:
        return TPUOutOfMemoryError(
            f"{name} does not fit on {target}: the compiler needs {hbm[0]} of HBM per device "
            f"and has {hbm[1]}. Use a smaller batch, more rematerialization, more sharding "
            'or a larger slice; compile_for(..., until="memory").memory says what takes it.'
        )
    if _RAN_OUT_OF_VMEM.search(text):
        return XLACompilationError(_vmem_words(text, name, target))
    unknown = _UNKNOWN_OPTION.search(text)
    if unknown:
        return FlagError(
            f"the TPU compiler does not know the option {unknown[1]!r}; "
            "`tpukit flags explain` finds the nearest one it knows."
        )
    if exported_by and _UNREADABLE.search(text):
        here = installed_versions("jax")["jax"]
        return XLACompilationError(
            f"jax {here} beside this tpukit cannot read {name}, which jax {exported_by} exported; "
            f"compile it with --toolchain jax-{exported_by}, or run tpukit in an environment with "
            "that jax."
        )
    first = next((line for line in text.splitlines() if line.strip()), "no message")
    return XLACompilationError(f"compiling {name} for {target} failed ({error.kind}): {first}")


def _vmem_words(text: str, name: str, target: Slice) -> str:
    """Say how much VMEM a kernel needs and has, and what makes it need less."""
    chip, sizes = target.chip, _sizes(_VMEM, text)
    whole = chip.vmem_bytes.value
    there = "" if whole is None else f" ({bytes_text(whole)} on each core of {chip.name})"
    needs, raised = f"needs more VMEM than there is{there}", ""
    if sizes is not None:
        need, limit = map(_in_bytes, sizes)
        needs = f"needs {bytes_text(need)} of VMEM, but has {bytes_text(limit)}{there}"
        raised = ", or raise its vmem_limit_bytes" if need < (whole or 0) else ""
    largest = _LARGEST.search(text)
    window = f"; the window of its {largest[1]} is {largest[2]}" if largest else ""
    return f"a kernel of {name} {needs}{window}. Make its blocks smaller{raised}."


def _sizes(patterns: tuple[re.Pattern[str], ...], text: str) -> tuple[str, str] | None:
    """Return what is needed and what there is, in the compiler's words."""
    found = next((match for one in patterns if (match := one.search(text))), None)
    return None if found is None else (found[1], found[2])


def _in_bytes(size: str) -> float:
    unit = size[-1] if size[-1] in _UNITS else ""
    return float(size.removesuffix(unit)) * _UNITS[unit]
