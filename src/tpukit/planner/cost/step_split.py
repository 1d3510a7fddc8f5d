"""A step's seconds by what they are spent on, for many candidates at once."""

from dataclasses import dataclass

import numpy as np

CAUSES = ("matrix", "attention", "hbm", "ici", "dcn", "host", "bubble")


@dataclass(frozen=True)
class StepSplit:
    """Seconds of a step by what they are spent on, as arrays (origin: model)."""

    matrix: np.ndarray
    attention: np.ndarray
    hbm: np.ndarray
    ici: np.ndarray
    dcn: np.ndarray
    host: np.ndarray
    bubble: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The step."""
        return sum((getattr(self, cause) for cause in CAUSES), np.zeros_like(self.matrix))

    def at(self, index: int) -> dict[str, float]:
        """The seconds of one candidate."""
        return {cause: float(getattr(self, cause)[index]) for cause in CAUSES}
