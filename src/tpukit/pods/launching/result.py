"""How a launched run ended, for people, scripts and shells."""

from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, PodUnavailable, ProviderError, TPUError
from ...runtime.exit_codes import ExitCode
from ...shown import Shown
from ..causes import Cause, Kind
from ..cost import CostReport
from .run_log import RunLogEntry

NO_CAPACITY = 5
GAVE_UP = 6
_BY_CAUSE = {
    Cause.DIVERGED: ExitCode.DIVERGED,
    Cause.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    Cause.BAD_INPUT: ExitCode.BAD_INPUT,
}
_BY_KIND = {
    Kind.DONE: ExitCode.DONE,
    Kind.APPLICATION: ExitCode.FAILED,
    Kind.CAPACITY: NO_CAPACITY,
    Kind.INFRASTRUCTURE: GAVE_UP,
    Kind.EVICTION: GAVE_UP,
}


def code_of(error: TPUError) -> int:
    """Return the exit code of a run that an error ended before its job told how it went."""
    match error:
        case ConfigError():
            return int(ExitCode.BAD_INPUT)
        case PodUnavailable():
            return NO_CAPACITY
        case ProviderError():
            return GAVE_UP
        case _:
            return int(ExitCode.BAD_INPUT)


@dataclass(frozen=True)
class LaunchResult(Shown):
    """The last word of a run, and what it cost.

    Attributes:
        entry: What the supervisor wrote last.
    """

    name: str
    entry: RunLogEntry
    cost: CostReport

    @property
    def cause(self) -> Cause | None:
        """Why it ended; None where its supervisor failed."""
        ending = self.entry.data.get("ending")
        return None if ending is None else Cause(ending["cause"])

    @property
    def exit_code(self) -> int:
        """What `tpukit launch` exits with.

        0 done, or stopped and saved; 1 failed; 2 refused input; 3 diverged; 4 out of memory; 5 no
        capacity anywhere; 6 given up after failures or an eviction, the provider is out of reach,
        or the supervisor was killed.
        """
        if self.entry.kind == "error":
            return int(self.entry.data.get("code", ExitCode.BAD_INPUT))
        assert self.cause is not None
        return int(_BY_CAUSE.get(self.cause, _BY_KIND[self.cause.kind]))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "exit_code": self.exit_code,
            "text": self.entry.text,
            **self.entry.data,
            "cost": self.cost.to_dict(),
        }

    def __rich__(self) -> Any:
        from rich.text import Text

        said = self.entry.data
        reason = f" ({said['reason']})" if said.get("reason") else ""
        lines = [Text.assemble((self.name, "bold"), f": {self.entry.text}{reason}")]
        if attempts := len(said.get("attempts", ())):
            lost = sum(one["lost_steps"] for one in said["losses"])
            down_s = sum(one["downtime_s"] or 0.0 for one in said["losses"])
            again = f", {lost} steps done again, {down_s:.1f} s down" if attempts > 1 else ""
            lines.append(Text(f"{attempts} attempt{'s' * (attempts > 1)}{again}"))
        return Text("\n").join([*lines, Text(self.cost.summary)])
