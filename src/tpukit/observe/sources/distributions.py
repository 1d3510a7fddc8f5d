"""Quantiles of the bucketed distributions that libtpu keeps of its latencies."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

QUANTILES = (0.5, 0.9, 0.95, 0.999)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Counts by exponential bucket.

    Bucket 0 ends at `scale`; bucket i begins at scale · growth^(i-1).
    """

    counts: tuple[int, ...]
    scale: float
    growth: float

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    def __add__(self, other: "Buckets") -> "Buckets":
        pairs = itertools.zip_longest(self.counts, other.counts, fillvalue=0)
        return Buckets(tuple(a + b for a, b in pairs), self.scale, self.growth)

    def quantile(self, share: float) -> float:
        """Return the value below which `share` of all lie, interpolated within its bucket.

        Raises:
            ValueError: There are no values.
        """
        wanted = int(self.count * share)
        below = 0
        for index, count in enumerate(self.counts):
            if count and below + count > wanted:
                begin = 0.0 if index == 0 else self.scale * self.growth ** (index - 1)
                end = self.scale * self.growth**index
                return begin + (end - begin) * (wanted - below) / count
            below += count
        raise ValueError("a distribution without values has no quantiles")


def quantiles_of(buckets: Buckets, quantiles: Sequence[float] = QUANTILES) -> Mapping[str, float]:
    """Return the quantiles by their names, such as "0.5"; empty where there are no values."""
    if not buckets.count:
        return {}
    return {f"{share:g}": buckets.quantile(share) for share in quantiles}
