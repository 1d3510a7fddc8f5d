"""How pods exchange and learn, whoever they are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optax

from ...errors import ConfigError
from .strategy import AllReduceStrategy, PodTopology

LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class ExchangeSettings:
    """What a `MultiPodManager` was told.

    Attributes:
        compress: Whether sums between pods are rounded to eight bits, with error feedback.
        local_steps: Steps between two meetings, for the strategy of that name.
        outer: Takes the step of a meeting; None: as in DiLoCo's paper.
        checkpoint_dir: Where the last common step is kept, for a job that has to start again.
        save_every: Steps between two of those.
    """

    optimizer: optax.GradientTransformation
    topology: PodTopology = PodTopology.MESH
    strategy: AllReduceStrategy = AllReduceStrategy.HIERARCHICAL
    compress: bool = False
    local_steps: int = 50
    outer: optax.GradientTransformation | None = None
    checkpoint_dir: str | Path | None = None
    save_every: int = 1

    def __post_init__(self) -> None:
        whole = (AllReduceStrategy.FLAT, AllReduceStrategy.RING)
        if self.compress and self.strategy in whole:
            raise ConfigError(
                f"The strategy {self.strategy.value} has no stage between pods whose sums could "
                "be rounded; use hierarchical or local_steps, or leave compression out."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "topology": self.topology.value,
            "strategy": self.strategy.value,
            "compress": self.compress,
            "local_steps": self.local_steps,
        }
