"""A number that says where it came from, or why there is none."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from ..errors import TPUNotAvailableError, TPUValidationError

Origin = Literal["measured", "compiler", "model", "datasheet"]
ORIGINS: tuple[str, ...] = get_args(Origin)

_BINARY_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity with its provenance.

    Attributes:
        value: The number, or None when nobody measured or published it.
        unit: What the number counts: "TFLOP/s", "GB/s" (bytes, 10^9), "B", "GHz", "USD/chip-h" …
        origin: `measured`, `compiler`, `model` or `datasheet`; None only when `value` is.
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
                    f"A figure in {self.unit!r} without a value needs a reason that says why."
                )
        elif self.origin not in ORIGINS or not self.source:
            raise TPUValidationError(
                f"The figure {self.value:g} {self.unit} has origin {self.origin!r} and source "
                f"{self.source!r}; expected one of {', '.join(ORIGINS)} and a source."
            )

    @classmethod
    def missing(cls, unit: str, reason: str) -> "Figure":
        """A figure nobody measured or published, with the reason."""
        return cls(None, unit, reason=reason)

    @classmethod
    def cited(
        cls, entry: Mapping[str, Any], unit: str, sources: Mapping[str, Mapping[str, str]]
    ) -> "Figure":
        """A figure as data files write it: a value and the name of its source, or why it has none.

        Raises:
            TPUValidationError: The source is none of `sources`.
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

    def scaled(self, factor: float, *, unit: str | None = None) -> "Figure":
        """The same figure times `factor`, with the same provenance; a missing one stays missing.

        Bytes stay whole.
        """
        unit = unit or self.unit
        scaled = None if self.value is None else self.value * factor
        if scaled is not None and unit == "B":
            scaled = round(scaled)
        return replace(self, value=scaled, unit=unit)

    def require(self, needed_for: str) -> float:
        """The value, or a TPUNotAvailableError that gives the reason there is none."""
        if self.value is None:
            raise TPUNotAvailableError(
                f"{needed_for} needs a figure in {self.unit} that is not known: {self.reason}"
            )
        return self.value

    def to_dict(self) -> dict[str, Any]:
        """The value, its unit, and whatever is known of its provenance."""
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
    """One of the sources that a data file describes.

    Raises:
        TPUValidationError: It describes none of that name.
    """
    if name not in sources:
        raise TPUValidationError(
            f"a data file cites the source {name!r} and does not describe it; it describes "
            f"{', '.join(sources)}."
        )
    return sources[name]


def format_quantity(value: float, unit: str) -> str:
    """Write a value for a person: bytes in binary multiples, thousands separated."""
    if unit == "B":
        power = 0
        while abs(value) >= 1024 and power < len(_BINARY_PREFIXES) - 1:
            value /= 1024
            power += 1
        return f"{_plain(value)} {_BINARY_PREFIXES[power]}"
    return f"{_plain(value)} {unit}".rstrip()


def _plain(value: float) -> str:
    """Four significant digits or all whole ones, no exponent, no trailing zeros."""
    whole_digits = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    text = f"{value:,.{max(0, 4 - whole_digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
