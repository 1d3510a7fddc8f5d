"""`Figure`: a number with its unit and source, or the reason why there is no number.

Figures multiply, divide and add. A result gets the least certain origin of its inputs, so no code
states the origin of a derived figure.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from ..errors import TPUNotAvailableError, TPUValidationError
from ..plain_data import JsonMapping, JsonObject
from ..shown import Shown
from .missing import Measured, Missing

Origin = Literal["datasheet", "measured", "compiler", "third-party", "user", "model"]
# From the most to the least certain, each with its meaning.
ORIGINS: dict[str, str] = {
    "datasheet": "published by the maker of the chip",
    "measured": "timed on this machine or taken from a published measurement",
    "compiler": "read from the TPU compiler's output for this program",
    "third-party": "from a public collection, such as a list of prices",
    "user": "given by you",
    "model": "predicted by tpukit's arithmetic on a step or a schedule",
}
_DOUBT = tuple(ORIGINS)

_BINARY_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (1e-6, "µs", 1e6), (1e-9, "ns", 1e9))
_FLOPS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))


@dataclass(frozen=True, slots=True)
class Figure(Shown):
    """One quantity with its provenance.

    Attributes:
        value: The number, or None if it was never measured or published.
        unit: What the number counts: "TFLOP/s", "GB/s" (bytes, 10^9), "B", "GHz", "USD/chip-h" …
        origin: One of `ORIGINS`; None only when `value` is None.
        source: Document, program or run the number was taken from.
        date: When the source was read or the run was made, ISO format.
        reason: Why there is no value.
        note: Where other sources disagree, and why this one was chosen.
    """

    value: float | None
    unit: str
    origin: Origin | None = None
    source: str = ""
    date: str = ""
    reason: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.value is None:
            if not self.reason:
                raise TPUValidationError(
                    f"A figure in {self.unit!r} without a value needs a reason."
                )
        elif self.origin not in ORIGINS or not self.source:
            raise TPUValidationError(
                f"The figure {self.value:g} {self.unit} has origin {self.origin!r} and source "
                f"{self.source!r}; expected one of {', '.join(ORIGINS)} and a source."
            )

    @classmethod
    def missing(cls, unit: str, reason: str) -> "Figure":
        """Return a figure without a value, and the reason."""
        return cls(None, unit, reason=reason)

    @classmethod
    def cited(
        cls, entry: JsonMapping, unit: str, sources: Mapping[str, Mapping[str, str]]
    ) -> "Figure":
        """Read a figure of a data file: a value and the name of its source, or `missing`.

        Raises:
            TPUValidationError: `sources` does not describe the source.
        """
        if "missing" in entry:
            return cls.missing(unit, entry["missing"])
        source = find_source(entry["source"], sources)
        return cls(
            entry["value"],
            unit,
            origin=cast(Origin, source["origin"]),
            source=source["title"],
            date=source["date"],
            note=entry.get("note", ""),
        )

    @property
    def number(self) -> Measured:
        """The number, or `Missing` with the reason."""
        return Missing(self.reason) if self.value is None else self.value

    def scaled(self, factor: float, *, unit: str | None = None) -> "Figure":
        """Return the figure times `factor`, with the same provenance; a missing one stays missing.

        Bytes are rounded to whole numbers.
        """
        unit = unit or self.unit
        scaled = None if self.value is None else self.value * factor
        if scaled is not None and unit == "B":
            scaled = round(scaled)
        return replace(self, value=scaled, unit=unit)

    @classmethod
    def derived(cls, value: float | None, unit: str, *, inputs: "Iterable[Figure]") -> "Figure":
        """Return a figure computed from others; it gets the least certain of their origins.

        The result is missing, with the reason, if an input is missing.
        """
        used = tuple(inputs)
        reasons = _joined(figure.reason for figure in used if figure.value is None)
        if reasons or value is None:
            return cls.missing(unit, reasons or "it cannot be computed from the known figures.")
        known: list[Origin] = [figure.origin for figure in used if figure.origin is not None]
        return cls(
            value,
            unit,
            origin=max(known, key=_DOUBT.index),
            source=_joined(figure.source for figure in used),
            date=min((figure.date for figure in used if figure.date), default=""),
            note=_joined(figure.note for figure in used),
        )

    def __mul__(self, other: "Figure | float") -> "Figure":
        if not isinstance(other, Figure):
            return self.scaled(other)
        product = _both(self.value, other.value, lambda a, b: a * b)
        return Figure.derived(product, _times(self.unit, other.unit), inputs=(self, other))

    __rmul__ = __mul__

    def __truediv__(self, other: "Figure | float") -> "Figure":
        if not isinstance(other, Figure):
            return self.scaled(1 / other)
        ratio = _both(self.value, other.value, lambda a, b: a / b)
        return Figure.derived(ratio, _over(self.unit, other.unit), inputs=(self, other))

    def __add__(self, other: "Figure") -> "Figure":
        if self.unit != other.unit:
            raise TPUValidationError(
                f"{self.unit!r} and {other.unit!r} cannot be added; convert both to one unit first."
            )
        total = _both(self.value, other.value, lambda a, b: a + b)
        return Figure.derived(total, self.unit, inputs=(self, other))

    def require(self, needed_for: str) -> float:
        """Return the value; raise TPUNotAvailableError with the reason if there is none."""
        if self.value is None:
            raise TPUNotAvailableError(
                f"{needed_for} needs a figure in {self.unit}, but it is not known: {self.reason}"
            )
        return self.value

    def to_dict(self) -> JsonObject:
        """Return value, unit and provenance; empty fields are left out."""
        shown = {"value": self.value, "unit": self.unit}
        for name in ("origin", "source", "date", "reason", "note"):
            if getattr(self, name):
                shown[name] = getattr(self, name)
        return shown

    @property
    def text(self) -> str:
        """The value and unit alone, such as "31.25 GiB", or "–"."""
        return "–" if self.value is None else format_quantity(self.value, self.unit)

    def __str__(self) -> str:
        if self.value is None:
            return f"– ({self.reason})"
        return f"{self.text} ({self.origin})"

    def __rich__(self) -> str:
        return str(self)


def find_source(name: str, sources: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    """Return a source that a data file describes.

    Raises:
        TPUValidationError: The file does not describe it.
    """
    if name not in sources:
        raise TPUValidationError(
            f"a data file cites the source {name!r} but does not describe it; it describes "
            f"{', '.join(sources)}."
        )
    return sources[name]


def format_quantity(value: float, unit: str) -> str:
    """Format a value: bytes in binary multiples, other numbers with thousands separators."""
    if unit == "B":
        power = 0
        while abs(value) >= 1024 and power < len(_BINARY_PREFIXES) - 1:
            value /= 1024
            power += 1
        return f"{_plain(value)} {_BINARY_PREFIXES[power]}"
    return f"{_plain(value)} {unit}".rstrip()


def seconds_text(seconds: float) -> str:
    """Format a duration, for example as "1.202 s", "26.5 ms" or "412 µs"."""
    for least, unit, factor in _SECONDS:
        if abs(seconds) >= least * 0.9995:
            return f"{seconds * factor:.4g} {unit}"
    return "0 s" if not seconds else f"{seconds:.2g} s"


def bytes_text(amount: float) -> str:
    """Format a number of bytes, for example as "21.3 GiB"."""
    return format_quantity(amount, "B")


def count_text(amount: int, what: str) -> str:
    """Format a count with its noun, for example as "1 host" or "1,024 hosts"."""
    return f"{amount:,} {what}" + ("" if amount == 1 else "s")


def flops_text(amount: float) -> str:
    """Format a number of FLOPs, for example as "3.299 TFLOP"."""
    for least, unit in _FLOPS:
        if amount >= least:
            return f"{amount / least:.4g} {unit}"
    return f"{amount:.4g} FLOP"


def _plain(value: float) -> str:
    """Format with four significant digits, or all digits of a whole number; no trailing zeros."""
    whole_digits = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    text = f"{value:,.{max(0, 4 - whole_digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _joined(texts: Iterable[str]) -> str:
    """Join the texts, without empty ones and repetitions."""
    return "; ".join(dict.fromkeys(filter(None, texts)))


def _both(
    left: float | None, right: float | None, combine: Callable[[float, float], float]
) -> float | None:
    return None if left is None or right is None else combine(left, right)


def _times(left: str, right: str) -> str:
    """The unit of a product: "USD/chip-h" times "chip-h" is "USD"."""
    counts = _powers(left)
    counts.update(_powers(right))
    return _unit(counts)


def _over(left: str, right: str) -> str:
    counts = _powers(left)
    counts.subtract(_powers(right))
    return _unit(counts)


def _powers(unit: str) -> Counter[str]:
    """Return the power of each part of a unit such as "tokens/s/chip"; divisors are negative."""
    above, *below = unit.split("/")
    powers = Counter({part: 1 for part in above.split("·") if part and part != "1"})
    powers.subtract(below)
    return powers


def _unit(powers: Counter[str]) -> str:
    above = [part for part, power in powers.items() for _ in range(power)]
    below = [part for part, power in powers.items() for _ in range(-power)]
    return "/".join(["·".join(above) or ("1" if below else ""), *below])
