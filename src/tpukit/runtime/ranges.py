"""Valid ranges of numbers: one list for job files, Python arguments and the command line."""

import math
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; infinity and NaN are in no range.

    Attributes:
        low: The smallest number; excluded if `above` is set.
        high: The largest.
        above: Whether `low` itself is excluded.
    """

    low: float
    high: float
    above: bool = False

    def __contains__(self, number: float) -> bool:
        if (isinstance(number, float) and not math.isfinite(number)) or number > self.high:
            return False
        return number > self.low if self.above else number >= self.low

    def check(self, name: str, value: object, *, unit: str = "") -> float:
        """Return the value if it is a number in this range.

        Raises:
            ConfigError: It is not; the message has the value and the range.
        """
        if isinstance(value, int | float) and not isinstance(value, bool) and value in self:
            return value
        words = f" {unit}" if unit else ""
        raise ConfigError(f"{name} is {value!r}; accepted are {self}{words}.")

    def check_whole(self, name: str, value: object, *, unit: str = "") -> int:
        """Return the value if it is a whole number in this range.

        Raises:
            ConfigError: It is not; the message has the value and the range.
        """
        number = self.check(name, value, unit=unit)
        if number != int(number):
            raise ConfigError(f"{name} is {value!r}; expected a whole number.")
        return int(number)

    def __str__(self) -> str:
        return f"{'above ' if self.above else ''}{_written(self.low)} to {_written(self.high)}"


COUNT = Range(1, 2**31 - 1)
"""Of steps, examples, tokens, devices: what arrays are indexed by."""
INDEX = Range(0, 2**31 - 1)
"""Of a step, an argument; and a count that may be none."""
SEED = Range(0, 2**32 - 1)
"""What a random key holds; a longer one would give the numbers of a shorter one."""
SHARE = Range(0, 1, above=True)
"""Of a whole, and not nothing."""
PART = Range(0, 1)
"""Of a whole."""
SECONDS = Range(0, 365 * 24 * 3600, above=True)
"""To wait, at most a year."""
SCALE = Range(0, 1e6, above=True)
"""A rate, a norm or a factor."""
WEIGHT = Range(0, 1000)
"""Of a term that is added, which may be none."""
FLOPS = Range(0, 1e18, above=True)
"""Of a chip in a second."""

PRICE = Range(0, 1_000_000, above=True)
"""USD per hour."""


def _written(number: float) -> str:
    whole = isinstance(number, int) or (number.is_integer() and abs(number) < 1e12)
    return f"{int(number):,}" if whole else f"{number:.3g}"
