"""The compiler's memory report in the words of the memory model."""

from ...compiler.memory import MemoryReport
from .memory_model import MemorySplit

_PURPOSES = {"parameters": "weights", "optimizer state": "optimizer"}
_KEPT = ("weights", "gradients", "optimizer", "activations")


def split_of(memory: MemoryReport) -> MemorySplit:
    """Bytes of one device by purpose, as the compiler planned them; they add up to its total."""
    amounts: dict[str, float] = dict.fromkeys((*_KEPT, "temporaries"), 0.0)
    for name, size in memory.purposes.items():
        known = _PURPOSES.get(name, name)
        amounts[known if known in _KEPT else "temporaries"] += size
    return MemorySplit(**amounts, host=float(memory.host_bytes))
