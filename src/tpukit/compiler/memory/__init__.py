"""How a compiled program uses memory, read from the compiler's own listings."""

from .reading import read_memory as read_memory
from .view import ArgumentFinding as ArgumentFinding
from .view import Buffer as Buffer
from .view import MemoryReport as MemoryReport
from .view import Peak as Peak

__all__ = ["ArgumentFinding", "Buffer", "MemoryReport", "Peak", "read_memory"]
