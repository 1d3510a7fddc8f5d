"""The offline TPU compiler: any lowerable function, any slice, no TPU."""

from .aot import compile_for as compile_for
from .aot import compiler_versions as compiler_versions
from .compiled import CompiledStep as CompiledStep
from .compiled import MemoryUse as MemoryUse
from .program import Program as Program
from .program import lower_program as lower_program

__all__ = [
    "CompiledStep",
    "MemoryUse",
    "Program",
    "compile_for",
    "compiler_versions",
    "lower_program",
]
