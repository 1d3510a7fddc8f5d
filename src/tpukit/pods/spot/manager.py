"""`SpotManager`: request spot capacity where a useful step is expected to cost least."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self

from ...errors import PodUnavailable
from ...hardware import Figure, PriceBook, public_prices
from ...runtime.calls import either_way
from ...runtime.ranges import PRICE
from ...shown import Shown
from ..causes import Cause
from ..config import PodConfig
from ..pod import Pod, Tier
from ..store.store import NoLives, PodLives
from .ranking import BiddingStrategy, Work, ZoneRanking, rank_zones, seconds_figure


class Allocator(Protocol):
    """Allocates pods, such as `TpuManager`."""

    def allocate_pod(self, config: PodConfig) -> Pod:
        """Ask zone after zone, and return the pod when it is ready."""
        ...


@dataclass(frozen=True, kw_only=True)
class SpotManager(Shown):
    """Allocates spot pods; set up with keyword arguments or step by step.

    ```python
    spot = SpotManager().with_bidding_strategy("balanced").with_max_price_per_hour(2.5).build()
    print(spot.rank(config))
    pod = spot.bid_for_pod(config)
    ```

    No API accepts bids. Prices come from the catalog, and zones above the cap are not asked.

    Attributes:
        strategy: How zones are ranked.
        max_price_per_hour: Price cap in USD per hour for the whole pod; a request's own cap applies
            too.
        work: Durations of the job's steps, saves and restarts.
        manager: Requests the pod; by default a `TpuManager` set up from the environment.
        history: Earlier pods; by default those in the manager's store.
        prices: By default the public price list.
    """

    strategy: BiddingStrategy = BiddingStrategy.COST_OPTIMIZED
    max_price_per_hour: float | None = None
    work: Work = field(default_factory=Work)
    manager: Allocator | None = None
    history: PodLives | None = None
    prices: PriceBook = field(default_factory=public_prices, repr=False)
    now: Callable[[], float] = field(default=time.time, repr=False)

    def __post_init__(self) -> None:
        if self.max_price_per_hour is not None:
            PRICE.check("max_price_per_hour", self.max_price_per_hour, unit="USD")

    def with_bidding_strategy(self, strategy: BiddingStrategy | str) -> Self:
        """Set how zones are ranked."""
        return replace(self, strategy=BiddingStrategy(strategy))

    def with_max_price_per_hour(self, usd: float) -> Self:
        """Set the price cap for an hour of the whole pod."""
        return replace(self, max_price_per_hour=usd)

    def with_work(
        self,
        *,
        step_s: float | Figure | None = None,
        save_s: float | Figure | None = None,
        restart_s: float | Figure | None = None,
    ) -> Self:
        """Set the durations of steps, saves and restarts; measured ones make the ranking exact."""
        times = {"step_s": step_s, "save_s": save_s, "restart_s": restart_s}
        known = {
            name: seconds_figure(seconds, name)
            for name, seconds in times.items()
            if seconds is not None
        }
        return replace(self, work=replace(self.work, **known))

    def with_manager(self, manager: Allocator) -> Self:
        """Request pods with this manager."""
        return replace(self, manager=manager)

    def with_history(self, history: PodLives) -> Self:
        """Use this record of earlier pods."""
        return replace(self, history=history)

    def with_prices(self, prices: PriceBook) -> Self:
        """Use these prices, such as `public_prices().with_rates("mine.yaml")`."""
        return replace(self, prices=prices)

    def build(self) -> Self:
        """Return the manager; all values were checked when they were set."""
        return self

    def rank(self, config: PodConfig) -> ZoneRanking:
        """Return the zones in the order to ask, and why others are excluded.

        Args:
            config: The request; without zones, all zones of the catalog are ranked.
        """
        caps = [cap for cap in (self.max_price_per_hour, config.max_price_per_hour) if cap]
        return rank_zones(
            config.slice,
            config.zones,
            book=self.prices,
            history=self._lives,
            work=self.work,
            strategy=self.strategy,
            now=self.now(),
            max_price_per_hour=min(caps, default=None),
        )

    @either_way
    def bid_for_pod(self, config: PodConfig) -> Pod:
        """Request the pod zone by zone, in the order of the ranking.

        Raises:
            PodUnavailable: No zone with a known price is within the cap, so nothing was requested;
                or none of them has capacity.
        """
        ranking = self.rank(config)
        if not ranking.bids:
            raise PodUnavailable(self._refusal(config, ranking), cause=Cause.UNPLACEABLE.value)
        zones = [bid.zone for bid in ranking.bids]
        request = replace(config, zones=tuple(zones), tier=Tier.SPOT)
        return self._allocator.allocate_pod(request)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "strategy": self.strategy.value,
            "max_price_per_hour": self.max_price_per_hour,
            "step_s": self.work.step_s.to_dict(),
            "save_s": self.work.save_s.to_dict(),
            "restart_s": self.work.restart_s.to_dict(),
        }

    def _refusal(self, config: PodConfig, ranking: ZoneRanking) -> str:
        reasons = "; ".join(f"{zone}: {why}" for zone, why in list(ranking.refused.items())[:4])
        more = len(ranking.refused) - 4
        return (
            f"No zone qualifies for spot {config.slice}: {reasons}"
            + (f"; and {more} more" if more > 0 else "")
            + f" ({ranking.age_text}). Raise max_price_per_hour, name other zones, or set your "
            "own prices with with_prices()."
        )

    @cached_property
    def _allocator(self) -> Allocator:
        if self.manager is not None:
            return self.manager
        from ..manager import TpuManager

        return TpuManager()

    @property
    def _lives(self) -> PodLives:
        if self.history is not None:
            return self.history
        from ..manager import TpuManager

        allocator = self._allocator
        return allocator.store.history if isinstance(allocator, TpuManager) else NoLives()
