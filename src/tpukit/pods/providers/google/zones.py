"""A zone that one of Google's APIs does not have, or that does not have a slice."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from ....errors import ConfigError, PodUnavailable, TPUError, did_you_mean
from ...causes import Cause

ZONES_PAGE = "https://cloud.google.com/tpu/docs/regions-zones"
_AT_ONCE = 16


def not_offered(
    said: str, *, zones: Callable[[], Iterable[str]], has_it: Callable[[str], bool]
) -> PodUnavailable:
    """Return the error of a zone that does not have a slice, with the zones that do.

    Args:
        said: What the zone does not have.
        zones: Lists the zones of the API.
        has_it: Asks one zone for the slice; a zone that does not answer is left out.
    """

    def has(zone: str) -> bool:
        try:
            return has_it(zone)
        except TPUError:
            return False

    try:
        known = sorted(zones())
    except TPUError:
        known = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = [
            zone for zone, is_there in zip(known, pool.map(has, known), strict=True) if is_there
        ]
    way_out = f"It is in {', '.join(found)}" if found else f"{ZONES_PAGE} lists where it is"
    return PodUnavailable(f"{said.rstrip('.')}. {way_out}.", cause=Cause.UNPLACEABLE.value)


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
