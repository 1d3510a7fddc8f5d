"""`PodConfig`: the requested slice, its zones and its terms."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ..errors import ConfigError
from ..hardware import Slice
from ..job.config import TPUConfig
from ..job.sections import LaunchSettings
from ..runtime.calls import either_way
from ..runtime.ranges import COUNT, PRICE, SECONDS
from ..shown import Shown
from .pod import Tier


class TpuConfig(TPUConfig):
    """The same settings as `TPUConfig`; reading the file can be awaited."""

    @classmethod
    @either_way
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a YAML file with a job or with flat settings."""
        return super().from_file(path)


LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class PodConfig(Shown):
    """A request for a pod, written with keyword arguments or step by step.

    ```python
    PodConfig(tpu_type="v6e-16", zones=("us-east5-b",), tier=Tier.SPOT)
    PodConfig().with_tpu_type("v3-8").with_cores(8).in_zone("us-central1-a").build()
    ```

    Attributes:
        tpu_type: Any slice name; "2xv6e-256" requests two slices.
        cores: Expected number of TensorCores. A number that contradicts `tpu_type` is refused.
        zones: Zones to try, in order; empty uses the provider's own.
        queue_timeout_s: How long to wait in one zone's queue before the next zone is asked.
        max_price_per_hour: Price cap in USD per hour for the whole pod, checked against the price
            catalog.
        priority: Pods of higher priority go first in a queue.
        avoid: Names of hosts that failed before; excluded where the provider lets us choose hosts.
    """

    tpu_type: str | None = None
    cores: int | None = None
    zones: tuple[str, ...] = ()
    tier: Tier = Tier.ON_DEMAND
    reservation: str | None = None
    network: str = "default"
    software_version: str | None = None
    enable_ip_alias: bool = True
    max_price_per_hour: float | None = None
    queue_timeout_s: float = LONGEST_WAIT_S
    priority: int = 0
    avoid: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.max_price_per_hour is not None:
            PRICE.check("max_price_per_hour", self.max_price_per_hour, unit="USD")
        SECONDS.check("queue_timeout_s", self.queue_timeout_s)
        if self.cores is not None:
            COUNT.check_whole("cores", self.cores)
        if self.tpu_type is not None:
            self._refuse_other_cores(self.slice)

    def with_tpu_type(self, tpu_type: str) -> Self:
        """Request this slice, and drop a number of cores that was given for another slice."""
        return replace(self, tpu_type=tpu_type, cores=None if self.tpu_type else self.cores)

    def with_cores(self, cores: int) -> Self:
        """Set the expected number of TensorCores."""
        return replace(self, cores=cores)

    def in_zone(self, *zones: str) -> Self:
        """Set the zones to ask, in order."""
        return replace(self, zones=zones)

    def with_preemptible(self, preemptible: bool = True) -> Self:
        """Request cheaper capacity that may be preempted."""
        return replace(self, tier=Tier.SPOT if preemptible else Tier.ON_DEMAND)

    def with_labels(self, **labels: str) -> Self:
        """Add labels to the pod."""
        return replace(self, labels={**self.labels, **labels})

    def build(self) -> Self:
        """Check that a slice is set, and return the request; other values were checked when set.

        Raises:
            ConfigError: No slice is set.
        """
        _ = self.slice  # all other values were checked when they were set
        return self

    def _refuse_other_cores(self, where: Slice) -> None:
        if self.cores is not None and self.cores != where.chips * where.chip.cores_per_chip:
            raise ConfigError(
                f"{where} has {where.chips * where.chip.cores_per_chip} cores ({where.chips} "
                f"chips), not {self.cores}; remove with_cores, or name the intended slice."
            )

    @classmethod
    def of(cls, launch: LaunchSettings, on: str) -> "PodConfig":
        """Return the request of a job's `launch:` section."""
        if launch.spot and (launch.reserved or launch.reservation):
            raise ConfigError("launch: sets both spot and reserved; set only one of them.")
        held = launch.reserved or launch.reservation is not None
        first = () if launch.zone is None else (launch.zone,)
        return cls(
            tpu_type=on,
            zones=tuple(dict.fromkeys((*first, *launch.zones))),
            tier=Tier.RESERVED if held else Tier.SPOT if launch.spot else Tier.ON_DEMAND,
            reservation=launch.reservation,
            network=launch.network,
            software_version=launch.software_version,
            enable_ip_alias=launch.enable_ip_alias,
            max_price_per_hour=launch.max_price_per_hour,
            queue_timeout_s=launch.queue_timeout_seconds,
            priority=launch.priority,
        ).build()

    @property
    def preemptible(self) -> bool:
        """Whether the pod may be preempted, that is, its tier is spot."""
        return self.tier is Tier.SPOT

    @property
    def zone(self) -> str | None:
        """The zone to try first; None leaves the choice to the provider."""
        return self.zones[0] if self.zones else None

    @property
    def slice(self) -> Slice:
        """The requested slice."""
        if self.tpu_type is None:
            raise ConfigError("A pod needs a slice, for example with_tpu_type('v6e-8').")
        return Slice.parse(self.tpu_type)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` reads."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return plain | {
            "zones": list(self.zones),
            "avoid": list(self.avoid),
            "tier": self.tier.value,
            "labels": dict(self.labels),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PodConfig":
        """Read what `to_dict` wrote."""
        plain = dict(values)
        zones, tier = plain.pop("zones"), plain.pop("tier")
        avoid = plain.pop("avoid", ())
        return cls(**plain, zones=tuple(zones), avoid=tuple(avoid), tier=Tier(tier))
