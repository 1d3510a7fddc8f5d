"""The offline TPU compiler: any lowerable function, any slice, no TPU."""

from .aot import compile_for as compile_for
from .aot import compile_many as compile_many
from .cache import CompileCache as CompileCache
from .compiled import CompiledStep as CompiledStep
from .executable_file import ExecutableHeader as ExecutableHeader
from .executable_file import read_header as read_header
from .executables import load_executable as load_executable
from .executables import save_executable as save_executable
from .flag_search import tune_flags as tune_flags
from .flag_trials import FlagSearch as FlagSearch
from .flag_trials import FlagTrial as FlagTrial
from .loaded_step import LoadedStep as LoadedStep
from .memory import MemoryReport as MemoryReport
from .program import Program as Program
from .program import lower_program as lower_program
from .request import CompileRequest as CompileRequest
from .request import compiler_versions as compiler_versions
from .request import make_request as make_request

__all__ = [
    "CompileCache",
    "CompileRequest",
    "CompiledStep",
    "ExecutableHeader",
    "FlagSearch",
    "FlagTrial",
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
    "tune_flags",
]
