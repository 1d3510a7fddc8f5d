"""One way to print a performance claim: figure, target, ratio, verdict."""

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Claim:
    """A measured figure and the bar it has to clear, if there is one."""

    what: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def target(self) -> str:
        """The bar, in words; "" where there is none."""
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return "" if self.at_least is None else f"≥ {self.at_least:g}"

    @property
    def verdict(self) -> str:
        """Whether the bar is cleared; "" where there is none."""
        if not self.target:
            return ""
        low = self.at_most is None or self.value <= self.at_most
        high = self.at_least is None or self.value >= self.at_least
        return "met" if low and high else "MISSED"

    def __str__(self) -> str:
        line = f"{self.what:<52} {self.value:10.4g} {self.unit:<10}"
        if not self.target:
            return line
        bar = self.at_most if self.at_most is not None else self.at_least
        ratio = f"{self.value / bar:6.2f}×  " if bar else ""
        return f"{line} target {self.target}  {ratio}{self.verdict}"


def report(*claims: Claim) -> None:
    """Print each claim on its own line, and keep them where a benchmark was run by itself."""
    for claim in claims:
        print(claim)
    script = Path(sys.argv[0]).resolve()
    if script.parent == Path(__file__).resolve().parent:
        from bars import keep

        keep(script.stem, claims)
