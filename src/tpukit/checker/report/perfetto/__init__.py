"""A predicted step as a trace for Perfetto, in either format it reads."""

from .writing import write_perfetto as write_perfetto

__all__ = ["write_perfetto"]
