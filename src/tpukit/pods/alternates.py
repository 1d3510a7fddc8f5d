"""What else to ask for when a pod is not to be had: other zones first, then other types."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import PodUnavailable
from ..hardware import Slice
from ..hardware.prices import PriceBook, public_prices
from .config import PodConfig
from .pod import Pod


def alternates_of(
    pod: Pod,
    config: PodConfig,
    tpu_types: Sequence[str],
    *,
    known_zones: Sequence[str],
    prices: PriceBook | None = None,
) -> list[PodConfig]:
    """Return what to ask for instead of a pod, best first.

    Args:
        pod: The one that failed.
        config: What it was asked for with.
        tpu_types: Other types, in this order, in the same zones.
        known_zones: Where the provider offers pods; where it does not say, the price catalogue
            knows zones of the type. They count where the request names no other zone, those of
            the same region and continent first.
        prices: The catalogue.
    """
    zones = tuple(zone for zone in config.zones if zone != pod.zone)
    if not zones:
        listed = tuple(known_zones) or _zones_with_a_price(config.slice, prices)
        others = [zone for zone in listed if zone != pod.zone]
        zones = tuple(sorted(others, key=lambda zone: _distance(zone, pod.zone)))
    same = [replace(config, zones=zones)] if zones else []
    return same + [
        replace(config, tpu_type=str(other), cores=None)
        for other in map(Slice.parse, tpu_types)
        if other != pod.slice
    ]


def _distance(zone: str, other: str) -> int:
    """0 in the same region ("us-east5"), 1 on the same continent ("us"), 2 elsewhere."""
    if zone.rpartition("-")[0] == other.rpartition("-")[0]:
        return 0
    return 1 if zone.partition("-")[0] == other.partition("-")[0] else 2


def _zones_with_a_price(where: Slice, prices: PriceBook | None) -> tuple[str, ...]:
    rates = (prices or public_prices()).find(where.chip.name)
    return tuple(dict.fromkeys(zone for rate in rates for zone in rate.zones))


@dataclass(frozen=True)
class Alternate:
    """The search for a pod in place of one that failed."""

    failed: Pod
    configs: Sequence[PodConfig]

    def take(self, allocate: Callable[[PodConfig], Pod]) -> Pod:
        """Return the first pod that is to be had.

        Raises:
            PodUnavailable: There is none.
        """
        refusal: PodUnavailable | None = None
        for config in self.configs:
            try:
                return allocate(config)
            except PodUnavailable as error:
                refusal = error
        said = f" The last refusal: {refusal}" if refusal else ""
        raise PodUnavailable(
            f"There is nothing in place of {self.failed.slice} in {self.failed.zone}: name more "
            f"zones, or other types with tpu_types=[…].{said}",
            cause=refusal.cause if refusal else "stockout",
        )
