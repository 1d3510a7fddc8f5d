"""`Reading`: the numbers one source gave at one time, and the reasons for those it did not."""

import math
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...shown import Shown


@dataclass(frozen=True, slots=True)
class Sample(Shown):
    """One number.

    Attributes:
        metric: A name of the glossary, or one that Orbax or Grain gave it.
        value: In the glossary's unit; shares are 0 to 1. Always finite.
        chip: Index of the chip on its host; None for the host or the run.
        labels: What else tells it from its neighbours: a quantile, a link, a buffer size.
    """

    metric: str
    value: float
    chip: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without what is empty."""
        shown: dict[str, Any] = {"metric": self.metric, "value": self.value}
        if self.chip is not None:
            shown["chip"] = self.chip
        if self.labels:
            shown["labels"] = dict(self.labels)
        return shown

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Sample":
        """Read what `to_dict` wrote.

        Raises:
            KeyError, TypeError: It is something else.
        """
        metric, labels, chip = data["metric"], data.get("labels", {}), data.get("chip")
        counted = chip is None or (type(chip) is int and chip >= 0)
        if not isinstance(metric, str) or not isinstance(labels, Mapping) or not counted:
            raise TypeError(f"{data!r:.60} is no sample")
        return cls(metric, data["value"], chip, labels)


@dataclass(frozen=True, slots=True)
class Reading(Shown):
    """What one source said at one time.

    Attributes:
        time: Unix seconds.
        host: Name of the machine.
        process: Index of the process of the run that is on it.
        source: Which source: "libtpu grpc", "jax", "nvml", "psutil", "trainer", "prometheus" …
        samples: The numbers.
        missing: Metrics it could not give, each with the reason. A metric is never a made-up zero.
    """

    time: float
    host: str
    process: int
    source: str
    samples: tuple[Sample, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict[str, str])

    def values(self, metric: str) -> list[float]:
        """Every value of a metric, chip after chip."""
        return [sample.value for sample in self.samples if sample.metric == metric]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in readings.jsonl."""
        return {
            "time": self.time,
            "host": self.host,
            "process": self.process,
            "source": self.source,
            "samples": [sample.to_dict() for sample in self.samples],
            "missing": dict(self.missing),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Reading":
        """Read what `to_dict` wrote.

        Raises:
            KeyError, TypeError: It is something else.
        """
        missing, process = data.get("missing", {}), data["process"]
        named = isinstance(data["source"], str) and isinstance(data["host"], str)
        if not named or type(process) is not int or not isinstance(missing, Mapping):
            raise TypeError(f"{data!r:.60} is no reading")
        return cls(
            time=data["time"],
            host=data["host"],
            process=process,
            source=data["source"],
            samples=tuple(Sample.from_dict(one) for one in data["samples"]),
            missing=missing,
        )


class ReadingBuilder:
    """Collects what a source finds, number by number.

    Args:
        source: Name of the source.
        wanted: Metrics the source is there for: those that get neither a number nor a reason are
            missing with the reason given to `build`.
        process: Index of the process of the run.
    """

    def __init__(self, source: str, wanted: Iterable[str] = (), *, process: int = 0) -> None:
        self._source, self._process = source, process
        self._wanted = tuple(wanted)
        self._samples: list[Sample] = []
        self._missing: dict[str, str] = {}

    def add(
        self,
        metric: str,
        value: float,
        *,
        chip: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Add a number; one that is not finite is missing instead, and says what it was."""
        if not math.isfinite(value):
            self.lack(metric, f"the source said {value}")
            return
        self._samples.append(Sample(metric, float(value), chip, labels or {}))

    def lack(self, metric: str, reason: str) -> None:
        """Say why there is no number of a metric; the first reason stands."""
        self._missing.setdefault(metric, reason)

    def build(
        self, *, otherwise: str = "the source did not say it", at: float | None = None
    ) -> Reading:
        """Return the reading, taken now unless another time is given."""
        given = {sample.metric for sample in self._samples}
        for metric in self._wanted:
            if metric not in given:
                self.lack(metric, otherwise)
        return Reading(
            time=time.time() if at is None else at,
            host=HOST,
            process=self._process,
            source=self._source,
            samples=tuple(self._samples),
            missing={name: why for name, why in self._missing.items() if name not in given},
        )


HOST = socket.gethostname()
