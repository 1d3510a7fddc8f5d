"""Compiled memory as a function of the batch that never falls.

The compiler schedules and fuses anew for every batch size, so its figure for a larger batch is
sometimes a little below that of a smaller one. An estimate must not be: whoever lowers the batch
expects to need no more. So powers of two are compiled, each estimate is the largest figure up to
its batch, and a size between two powers lies on the line between their estimates.
"""

from collections.abc import Callable
from dataclasses import fields

from ...errors import TPUError
from ..cost.memory_model import MemorySplit

LARGEST_FALL = 0.05
"""A smaller batch whose figure is lower by more than this share ends the search: nothing below it
is expected to need more again."""

Compile = Callable[[int], MemorySplit]


def rising_memory(compile_batch: Compile, size: int) -> tuple[MemorySplit, bool]:
    """Return the memory of a batch, and whether it is the compiler's figure for one compiled step.

    Args:
        compile_batch: Memory of a step with so many examples per device.
        size: Examples per device.

    Raises:
        TPUError: The step cannot be compiled with this batch.
    """
    found: dict[int, MemorySplit] = {}

    def of(examples: int) -> MemorySplit:
        if examples not in found:
            found[examples] = compile_batch(examples)
        return found[examples]

    low = 1 << (size.bit_length() - 1)
    if low == size:
        return _largest(of, size), True
    try:
        return _between(_largest(of, low), _largest(of, 2 * low), size / low - 1), False
    except TPUError:  # a model of one batch size has no neighbours
        return of(size), True


def _largest(of: Compile, size: int) -> MemorySplit:
    """Return the largest figure of `size` and of the smaller powers of two."""
    most = of(size)
    while size > 1:
        size //= 2
        try:
            smaller = of(size)
        except TPUError:
            return most
        if smaller.total < (1 - LARGEST_FALL) * most.total:
            return most
        if smaller.total > most.total:
            most = smaller
    return most


def _between(low: MemorySplit, high: MemorySplit, share: float) -> MemorySplit:
    parts = (one.name for one in fields(MemorySplit))
    return MemorySplit(
        **{name: (1 - share) * getattr(low, name) + share * getattr(high, name) for name in parts}
    )
