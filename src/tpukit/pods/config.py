"""`PodConfig`: which slice to ask for, where, and on which terms."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ..errors import ConfigError
from ..hardware import Slice
from ..job.sections import LaunchSettings
from ..runtime.ranges import COUNT, PRICE, SECONDS
from ..shown import Shown
from .pod import Tier
from .tpu_config import TpuConfig as TpuConfig

LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class PodConfig(Shown):
    """What is asked for, in keywords or step by step.

    ```python
    PodConfig(tpu_type="v6e-16", zones=("us-east5-b",), tier=Tier.SPOT)
    PodConfig().with_tpu_type("v3-8").with_cores(8).in_zone("us-central1-a").build()
    ```

    Attributes:
        tpu_type: Any name of a slice; "2xv6e-256" asks for two of them.
        cores: TensorCores, to be sure of what a name means: it must agree with `tpu_type`.
        zones: Tried in order; empty: the provider's own.
        queue_timeout_s: How long one zone may keep it waiting before the next is asked.
        max_price_per_hour: Most USD an hour for the whole pod, by the price catalogue.
        priority: A pod of higher priority goes first, where there is a queue.
        avoid: Names of hosts that gave trouble; left out where the provider can choose hosts.
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
        """Ask for this slice; cores that were stated for another slice no longer count."""
        return replace(self, tpu_type=tpu_type, cores=None if self.tpu_type else self.cores)

    def with_cores(self, cores: int) -> Self:
        """State how many TensorCores that is."""
        return replace(self, cores=cores)

    def in_zone(self, *zones: str) -> Self:
        """Ask in these zones, in this order."""
        return replace(self, zones=zones)

    def with_preemptible(self, preemptible: bool = True) -> Self:
        """Take capacity that may be taken away again, for less."""
        return replace(self, tier=Tier.SPOT if preemptible else Tier.ON_DEMAND)

    def with_labels(self, **labels: str) -> Self:
        """Add labels that the pod carries."""
        return replace(self, labels={**self.labels, **labels})

    def build(self) -> Self:
        """Return it; everything but a missing slice was refused when it was given.

        Raises:
            ConfigError: The slice is not stated.
        """
        _ = self.slice  # the rest was checked when it was given
        return self

    def _refuse_other_cores(self, where: Slice) -> None:
        if self.cores is not None and self.cores != where.chips * where.chip.cores_per_chip:
            raise ConfigError(
                f"{where} has {where.chips * where.chip.cores_per_chip} cores "
                f"({where.chips} chips), not {self.cores}; leave with_cores out, or name the "
                "slice that is meant."
            )

    @classmethod
    def of(cls, launch: LaunchSettings, on: str) -> "PodConfig":
        """Return what a job's `launch:` section asks for."""
        if launch.spot and (launch.reserved or launch.reservation):
            raise ConfigError("launch: says spot and reserved; a pod is one or the other.")
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
        """Whether the pod may be preempted, for less money: its tier is spot."""
        return self.tier is Tier.SPOT

    @property
    def zone(self) -> str | None:
        """The zone that is tried first; None leaves the choice to the provider."""
        return self.zones[0] if self.zones else None

    @property
    def slice(self) -> Slice:
        """The slice that is asked for."""
        if self.tpu_type is None:
            raise ConfigError("A pod needs a slice, for example with_tpu_type('v6e-8').")
        return Slice.parse(self.tpu_type)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `from_dict` reads it."""
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
