"""What numbers a plan accepts: outside of it an answer would be nonsense, so it is refused."""

from ..errors import ConfigError


def check_range(name: str, value: object, low: float, high: float, *, unit: str = "") -> float:
    """The value, where it is a number from `low` to `high`.

    Raises:
        ConfigError: It is not; the message says what is accepted.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        return value
    words = f" {unit}" if unit else ""
    raise ConfigError(f"{name} is {value!r}; accepted are {_plain(low)} to {_plain(high)}{words}.")


def check_count(name: str, value: object, low: int, high: int, *, unit: str = "") -> int:
    """The same of a whole number.

    Raises:
        ConfigError: It is none, or out of range.
    """
    number = check_range(name, value, low, high, unit=unit)
    if number != int(number):
        raise ConfigError(f"{name} is {value!r}; it is a whole number.")
    return int(number)


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) < 1e12 else f"{number:.3g}"
