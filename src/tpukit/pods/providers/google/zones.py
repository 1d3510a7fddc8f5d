"""A zone that one of Google's APIs does not have."""

from collections.abc import Iterable
from typing import Self

from ....errors import ConfigError, PodUnavailable, did_you_mean
from ...causes import Cause


class UnknownZone(ConfigError, PodUnavailable):
    """There is no such zone, or it is not offered to whoever asks.

    A wrong word where a person named the zone. Where it is one of many, as the price catalogue's
    are, no pod is to be had in it, and the next is asked.
    """

    def __init__(self, zone: str, *, who: str, listed_at: str, known: Iterable[str] = ()) -> None:
        self.zone, self.who, self.listed_at = zone, who, listed_at
        PodUnavailable.__init__(
            self,
            f"{who} knows no zone {zone!r}, or does not offer it to this project; {listed_at} "
            f"lists those there are.{did_you_mean(zone, known)}",
            cause=Cause.UNPLACEABLE.value,
        )

    def among(self, known: Iterable[str]) -> Self:
        """Return the same with the nearest of the zones that are there."""
        return type(self)(self.zone, who=self.who, listed_at=self.listed_at, known=known)
