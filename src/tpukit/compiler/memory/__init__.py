"""Where the memory of a compiled program goes, read from the compiler's own listings."""

from .reading import read_memory as read_memory
from .report import ArgumentFinding as ArgumentFinding
from .report import Buffer as Buffer
from .report import MemoryReport as MemoryReport
from .report import Peak as Peak

__all__ = ["ArgumentFinding", "Buffer", "MemoryReport", "Peak", "read_memory"]
