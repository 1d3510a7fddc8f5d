"""XLA and libtpu flags, checked against the parsers that will read them."""

from .bundles import enable_xla_optimizations as enable_xla_optimizations
from .flag import Flag as Flag
from .inspection import FlagExplanation as FlagExplanation
from .inspection import FlagReport as FlagReport
from .inspection import explain_flag as explain_flag
from .inspection import inspect_environment as inspect_environment
from .inspection import inspect_flags as inspect_flags
from .inspection import trial_compile as trial_compile
from .registry import FlagRegistry as FlagRegistry
from .setting import FlagRecord as FlagRecord
from .setting import as_compiler_options as as_compiler_options
from .setting import set_xla_flags as set_xla_flags
from .syntax import format_flags as format_flags
from .syntax import parse_flags as parse_flags

__all__ = [
    "Flag",
    "FlagExplanation",
    "FlagRecord",
    "FlagRegistry",
    "FlagReport",
    "as_compiler_options",
    "enable_xla_optimizations",
    "explain_flag",
    "format_flags",
    "inspect_environment",
    "inspect_flags",
    "parse_flags",
    "set_xla_flags",
    "trial_compile",
]
