"""`ScalingDecision`: change the pod or leave it, and why."""

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...shown import Shown
from ..config import PodConfig
from .sizes import Size


@dataclass(frozen=True, kw_only=True)
class ScalingDecision(Shown):
    """What to do; false where nothing is to be done, so that `if decision:` reads well.

    Attributes:
        config: The pod to have instead; None: keep the one that is there.
        reason: Why, in a sentence.
        sizes: All that were compared, smallest first.
    """

    now: Size
    config: PodConfig | None
    reason: str
    sizes: tuple[Size, ...]

    def __bool__(self) -> bool:
        return self.config is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "from": str(self.now.slice),
            "to": None if self.config is None else str(self.config.slice),
            "reason": self.reason,
            "sizes": [size.to_dict() for size in self.sizes],
        }

    def __rich__(self) -> RenderableType:
        to = "" if self.config is None else f" → {self.config.slice}"
        table = Table(box=None, pad_edge=False)
        for name in ("slice", "cores", "step", "in use", "USD/step", "from"):
            table.add_column(name, justify="left" if name in ("slice", "from") else "right")
        for size in self.sizes:
            usd = size.usd_per_step.value
            table.add_row(
                str(size.slice),
                str(size.cores),
                f"{size.step_s.value:.4g} s",
                f"{size.utilization.value:.1%}",
                "–" if usd is None else f"{usd:.3g}",
                size.step_s.origin,
            )
        return Group(Text(f"{self.now.slice}{to}: {self.reason}", style="bold"), table)
