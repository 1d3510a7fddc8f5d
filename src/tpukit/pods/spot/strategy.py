"""`BiddingStrategy`: what makes one zone better than another."""

from ..spelling import SpelledEnum


class BiddingStrategy(SpelledEnum):
    """What spot zones are ranked by. Zones that lose on both money and time never win.

    Attributes:
        COST_OPTIMIZED: Least money for a useful step.
        BALANCED: Least money times time for a useful step: a zone twice as dear must be more than
            twice as fast.
        AVAILABILITY: Least time for a useful step, waiting and recovering included.
    """

    COST_OPTIMIZED = "cost_optimized"
    BALANCED = "balanced"
    AVAILABILITY = "availability"

    CostOptimized = COST_OPTIMIZED
    Balanced = BALANCED
    Availability = AVAILABILITY

    def score(self, *, usd_per_useful_h: float, useful_share: float) -> float:
        """What to rank by, the lowest first."""
        slowness = 1 / useful_share if useful_share > 0 else float("inf")
        match self:
            case BiddingStrategy.COST_OPTIMIZED:
                return usd_per_useful_h
            case BiddingStrategy.BALANCED:
                return usd_per_useful_h * slowness
            case BiddingStrategy.AVAILABILITY:
                return slowness
