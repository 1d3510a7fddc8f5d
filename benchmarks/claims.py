"""One way to print a performance claim: figure, target, ratio, verdict."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A measured figure and the bar it has to clear, if there is one."""

    what: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    def __str__(self) -> str:
        line = f"{self.what:<52} {self.value:10.4g} {self.unit:<10}"
        if self.at_most is not None:
            met = "met" if self.value <= self.at_most else "MISSED"
            ratio = f"{self.value / self.at_most:6.2f}×  " if self.at_most else ""
            return f"{line} target ≤ {self.at_most:g}  {ratio}{met}"
        if self.at_least is not None:
            met = "met" if self.value >= self.at_least else "MISSED"
            return f"{line} target ≥ {self.at_least:g}  {self.value / self.at_least:6.2f}×  {met}"
        return line


def report(*claims: Claim) -> None:
    """Print each claim on its own line."""
    for claim in claims:
        print(claim)
