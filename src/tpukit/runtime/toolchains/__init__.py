"""Other pairs of jax and libtpu than the installed one, each in its own environment.

A process has one jax and one libtpu, and a new pair often needs a new Python. To see the effect of
an upgrade, the same command runs once more with the interpreter of an environment that has the
other pair.
"""

from .environments import environment as environment
from .environments import is_made as is_made
from .running import EndedProgram as EndedProgram
from .running import run_followed as run_followed
from .running import run_tpukit as run_tpukit
from .toolchain import RUNNING as RUNNING
from .toolchain import Toolchain as Toolchain
from .toolchain import find_interpreter as find_interpreter
from .toolchain import parse_toolchain as parse_toolchain
from .toolchain import parse_toolchains as parse_toolchains

__all__ = [
    "RUNNING",
    "EndedProgram",
    "Toolchain",
    "environment",
    "find_interpreter",
    "is_made",
    "parse_toolchain",
    "parse_toolchains",
    "run_followed",
    "run_tpukit",
]
