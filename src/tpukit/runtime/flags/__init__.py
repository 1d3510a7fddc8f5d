"""XLA and libtpu flags, checked against the parsers that will read them."""

from .bundles import enable_xla_optimizations as enable_xla_optimizations
from .explanation import FlagExplanation as FlagExplanation
from .explanation import explain_flag as explain_flag
from .flag import Flag as Flag
from .inspection import FlagReport as FlagReport
from .inspection import inspect_environment as inspect_environment
from .inspection import inspect_flags as inspect_flags
from .record import FlagRecord as FlagRecord
from .registry import FlagRegistry as FlagRegistry
from .setting import as_compiler_options as as_compiler_options
from .setting import set_xla_flags as set_xla_flags
from .syntax import format_flags as format_flags
from .syntax import parse_flags as parse_flags
from .trial import trial_compile as trial_compile

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
