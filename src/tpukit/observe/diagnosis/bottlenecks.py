"""Shares of a predicted step by what bounds it."""

from dataclasses import dataclass

from ...compiler.timeline import StepPrediction

# What bounds a step, by the causes that a timeline tells apart.
CAUSES_BY_KIND = {
    "compute": ("matrix", "kernel", "vector"),
    "memory": ("hbm",),
    "communication": ("ici", "dcn"),
    "host": ("host",),
    "overhead": ("overhead",),
}


@dataclass(frozen=True)
class Bottlenecks:
    """Shares of a predicted step by what bounds it; they add up to one. Origin `model`."""

    compute: float
    memory: float
    communication: float
    host: float
    overhead: float

    @classmethod
    def of(cls, prediction: StepPrediction) -> "Bottlenecks":
        """The shares of a predicted step."""
        whole = sum(prediction.seconds_by_cause.values()) or 1.0
        return cls(
            **{
                kind: sum(prediction.seconds_by_cause.get(cause, 0.0) for cause in causes) / whole
                for kind, causes in CAUSES_BY_KIND.items()
            }
        )
