"""The offline TPU compiler: any lowerable function, any slice, no TPU."""

from .aot import compile_for as compile_for
from .aot import compile_many as compile_many
from .cache import CompileCache as CompileCache
from .compiled import CompiledStep as CompiledStep
from .executable.file import ExecutableHeader as ExecutableHeader
from .executable.file import read_header as read_header
from .executable.loaded_step import LoadedStep as LoadedStep
from .executable.saving import load_executable as load_executable
from .executable.saving import save_executable as save_executable
from .memory import MemoryReport as MemoryReport
from .program.lowered import Program as Program
from .program.lowered import lower_program as lower_program
from .program.request import CompileRequest as CompileRequest
from .program.request import compiler_versions as compiler_versions
from .program.request import make_request as make_request

__all__ = [
    "CompileCache",
    "CompileRequest",
    "CompiledStep",
    "ExecutableHeader",
    "LoadedStep",
    "MemoryReport",
    "Program",
    "compile_for",
    "compile_many",
    "compiler_versions",
    "load_executable",
    "lower_program",
    "make_request",
    "read_header",
    "save_executable",
]
