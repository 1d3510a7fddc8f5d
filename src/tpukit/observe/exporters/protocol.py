"""The one protocol of everything that readings are written to."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ..readings import Reading


@runtime_checkable
class Exporter(Protocol):
    """Takes every round of readings.

    Attributes:
        name: What the log calls it.
    """

    name: str

    def export(self, readings: Sequence[Reading]) -> None:
        """Take the readings of one round; may raise: the monitor logs it once and goes on."""
        ...

    def close(self) -> None:
        """Write what is left and let go."""
        ...
