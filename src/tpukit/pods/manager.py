"""`TpuManager`: allocate pods, track them and release them (document 004)."""

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from ..errors import ConfigError, PodUnavailable, TPUError
from ..hardware import Slice
from ..hardware.prices import PriceBook, public_prices
from ..job.config import TPUConfig
from ..job.document import Origin
from ..job.sections import LaunchSettings
from ..runtime.calls import either_way
from ..runtime.doctor.finding import DoctorFinding
from ..runtime.progress import Progress, silent
from ..shown import Shown
from .allocation import Allocation, wait_until_gone
from .config import PodConfig
from .limits import Hold, find_refusal, limit_findings
from .pod import Pod, PodState, check_name
from .preemptible import POLL_S, PreemptionWatch
from .providers.protocol import Provider
from .providers.registry import open_provider
from .reconciler import Reconciler
from .settings import PodSettings
from .store import ProviderRecord, Store, WantedPod
from .supervision.journal import Attempt
from .supervision.policy import PreemptionHandler


def alternates_of(
    pod: Pod,
    config: PodConfig,
    tpu_types: Sequence[str],
    *,
    known_zones: Sequence[str],
    prices: PriceBook | None = None,
) -> list[PodConfig]:
    """Return requests for pods that could replace one, best first.

    Args:
        pod: The pod that failed.
        config: The request it was allocated with.
        tpu_types: Other slice types to try in the same zones, in this order.
        known_zones: Zones in which the provider offers pods; if empty, zones in the price catalog.
            They are used if the request names no other zone, nearest first.
        prices: The price catalog.
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
    """Return 0 in the same region ("us-east5"), 1 on the same continent ("us"), 2 elsewhere."""
    if zone.rpartition("-")[0] == other.rpartition("-")[0]:
        return 0
    return 1 if zone.partition("-")[0] == other.partition("-")[0] else 2


def _zones_with_a_price(where: Slice, prices: PriceBook | None) -> tuple[str, ...]:
    rates = (prices or public_prices()).find(where.chip.name)
    return tuple(dict.fromkeys(zone for rate in rates for zone in rate.zones))


@dataclass(frozen=True)
class Alternate:
    """The search for a pod that replaces a failed one."""

    failed: Pod
    configs: Sequence[PodConfig]

    def take(self, allocate: Callable[[PodConfig], Pod]) -> Pod:
        """Return the first pod that can be allocated.

        Raises:
            PodUnavailable: None of the requests succeeded.
        """
        refusal: PodUnavailable | None = None
        for config in self.configs:
            try:
                return allocate(config)
            except PodUnavailable as error:
                refusal = error
        last = f" The last refusal: {refusal}" if refusal else ""
        raise PodUnavailable(
            f"No pod can replace {self.failed.slice} in {self.failed.zone}: name more zones, or "
            f"other types with tpu_types=[…].{last}",
            cause=refusal.cause if refusal else "stockout",
        )


@dataclass(frozen=True, kw_only=True)
class PodHealth(Shown):
    """The state of a pod when it was last queried.

    Attributes:
        state: None if the pod does not exist.
        reason: Why it is in this state, and what to do about it.
        replaced: Number of earlier pods that were lost.
        attempts: Number of times the job was started on it.
        age_s: Seconds since it was first requested.
    """

    name: str
    state: PodState | None
    reason: str = ""
    hosts: int = 0
    replaced: int = 0
    attempts: int = 0
    age_s: float | None = None
    _facts = (
        *("name", "state", "is_healthy", "reason", "hosts"),
        *("replaced", "attempts", "age_s"),
    )

    @property
    def is_healthy(self) -> bool:
        """Whether all its hosts are ready."""
        return self.state is PodState.READY

    @classmethod
    def unknown(cls, name: str) -> "PodHealth":
        """Return the health of a pod that was never requested, or was released."""
        return cls(name=name, state=None, reason="there is no such pod; tpukit pods ls lists all")

    @classmethod
    def of(
        cls, row: WantedPod, seen: Pod | None, attempts: Sequence[Attempt], *, now: float
    ) -> "PodHealth":
        """Make it from the store's row, the provider's answer and the attempts."""
        reason = (
            "it does not exist; the next pass requests another" if seen is None else seen.reason
        )
        return cls(
            name=row.pod_name,
            state=None if seen is None else seen.state,
            reason=reason,
            hosts=0 if seen is None else len(seen.hosts),
            replaced=row.attempt - 1,
            attempts=len(attempts),
            age_s=now - row.wanted_at,
        )

    def __rich__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.name}: {self.state or 'does not exist'}{why}, {self.hosts} hosts"


RELEASED_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class TpuManager(Shown):
    """Allocates pods from a provider; set up with keyword arguments or step by step.

    ```python
    manager = TpuManager().with_project("p").with_zone("us-central1-a").build()
    manager = TpuManager(provider="gcp", project="p", zone="us-central1-a")
    pod = manager.allocate_pod(PodConfig(tpu_type="v6e-8"))
    ```

    Settings that are not given here come from environment variables (TPUKIT_PROVIDER, TPU_PROJECT,
    TPU_ZONE, TPU_NETWORK, GOOGLE_APPLICATION_CREDENTIALS), then from `launch`. `origin_of` returns
    the source of each. Calls block; in a coroutine, await them.

    Attributes:
        provider: local, gcp, gke, gce or ssh.
        launch: A job's `launch:` section, if there is one.
        state: The store that processes share; by default the user's own.
        prices: By default the public price list.
    """

    provider: str | None = None
    project: str | None = None
    zone: str | None = None
    zones: tuple[str, ...] = ()
    network: str | None = None
    credentials_file: str | None = None
    endpoint: str | None = None
    launch: LaunchSettings | None = None
    default_config: PodConfig | None = None
    state: Store | None = field(default=None, repr=False)
    prices: PriceBook | None = field(default=None, repr=False)
    gathered: PodSettings | None = field(default=None, repr=False)
    _last: list[Pod] = field(default_factory=list[Pod], repr=False, init=False)
    _watches: list[PreemptionWatch] = field(
        default_factory=list[PreemptionWatch], repr=False, init=False
    )

    # --- step by step ----------------------------------------------------------------------

    def with_provider(self, provider: str) -> Self:
        """Set the provider."""
        return replace(self, provider=provider)

    def with_project(self, project: str) -> Self:
        """Set the project."""
        return replace(self, project=project)

    def with_zone(self, *zones: str) -> Self:
        """Set the zones to ask, in order."""
        return replace(self, zone=zones[0] if zones else None, zones=zones[1:])

    def with_network(self, network: str) -> Self:
        """Connect pods to this network."""
        return replace(self, network=network)

    def with_credentials(self, file: str) -> Self:
        """Use the service account whose key is in a file."""
        return replace(self, credentials_file=file)

    def with_endpoint(self, endpoint: str) -> Self:
        """Connect to an API at this address, for example an emulator's."""
        return replace(self, endpoint=endpoint)

    def with_prices(self, prices: PriceBook) -> Self:
        """Use these prices for price caps and costs."""
        return replace(self, prices=prices)

    @either_way
    def build(self) -> Self:
        """Check the settings, open the provider, and return the manager."""
        _ = self.opened
        return self

    @classmethod
    @either_way
    def from_config(cls, config: TPUConfig, **arguments: Any) -> "TpuManager":
        """Make a manager from document 004's flat settings; their slice is the one to allocate.

        Args:
            config: Settings as `TPUConfig.from_file("tpu_config.yaml")` returns them.
            **arguments: Arguments of `TpuManager`, which override the environment and the file.
        """
        named = {name: arguments[name] for name in arguments if name in PodSettings.model_fields}
        settings = PodSettings.of_config(config, named)
        request = None
        if config.slice is not None:
            request = PodConfig(tpu_type=str(config.slice))
        return cls(gathered=settings, default_config=request, **arguments).build()

    # --- what holds ------------------------------------------------------------------------

    @cached_property
    def settings(self) -> PodSettings:
        """Settings merged from the launch section, the environment and the arguments."""
        if self.gathered is not None:
            return self.gathered
        section = {} if self.launch is None else self.launch.model_dump(exclude_unset=True)
        names = ("provider", "project", "zone", "network", "credentials_file", "endpoint")
        arguments: dict[str, Any] = {name: getattr(self, name) for name in names}
        return PodSettings.gather(section, arguments | {"zones": self.zones or None})

    def origin_of(self, name: str) -> Origin:
        """Return the source of a setting's value."""
        return self.settings.origin_of(name)

    @cached_property
    def opened(self) -> Provider:
        """The open provider."""
        return open_provider(self.settings.provider_name, self.settings)

    @cached_property
    def store(self) -> Store:
        """The store that processes share."""
        return self.state or Store()

    @cached_property
    def record(self) -> ProviderRecord:
        """The provider as the store records it."""
        return ProviderRecord.of(self.settings.provider_name, self.settings)

    @cached_property
    def reconciler(self) -> Reconciler:
        """The reconciler that makes the provider match the store."""

        def opener(record: ProviderRecord) -> Provider:
            mine = record.id == self.record.id
            return self.opened if mine else open_provider(record.name, record.launch)

        return Reconciler(self.store, opener=opener, prices=self.prices)

    # --- pods ------------------------------------------------------------------------------

    @either_way
    def allocate_pod(
        self,
        config: PodConfig | None = None,
        *,
        name: str | None = None,
        wait_s: float | None = None,
        progress: Progress = silent,
    ) -> Pod:
        """Ask zone after zone, and return the pod when it is ready.

        Args:
            config: The request; open values come from the settings. By default the configuration's
                slice.
            name: Name of the run, generated by default. The same name returns the same pod.
            wait_s: How long to retry after every zone has refused; by default there is no retry.
            progress: Called with one line per event.

        Raises:
            ConfigError: The name is not valid for every provider.
            PodUnavailable: No zone has capacity within the price cap; nothing is left behind.
            ProviderError: The provider cannot be reached, or rejects the credentials.
        """
        request = self.complete(config)
        run = check_name(name or f"tpu-{request.slice.chip.name.lower()}-{secrets.token_hex(3)}")
        allocation = Allocation(self.reconciler, self.opened, self.record, run, request)
        self._last[:] = [allocation.run(wait_s=wait_s, progress=progress)]
        return self._last[0]

    @either_way
    def allocate_preemptible_pod(
        self,
        config: PodConfig,
        preemption_handler: PreemptionHandler | None = None,
        *,
        name: str | None = None,
        wait_s: float | None = None,
        poll_s: float = POLL_S,
        progress: Progress = silent,
    ) -> Pod:
        """Allocate a spot pod, and call a handler when it is preempted.

        With `auto_restart` the handler also gets the pod that replaces it. `close()` ends the
        watch.
        """
        request = config.with_preemptible()
        handler = None if preemption_handler is None else preemption_handler.build()
        pod = self.allocate_pod(request, name=name, wait_s=wait_s, progress=progress)
        if handler is not None:
            self._watches.append(PreemptionWatch(self, pod, handler, poll_s=poll_s))
        return pod

    def close(self) -> None:
        """Stop watching pods; the pods themselves stay."""
        while self._watches:
            self._watches.pop().stop()

    @either_way
    def request_alternate_pod(
        self,
        failed: Pod | None = None,
        *,
        tpu_types: Sequence[str] = (),
        progress: Progress = silent,
    ) -> Pod:
        """Replace a pod that failed by one in another zone, or of another type.

        Args:
            failed: The pod to replace, which is released; by default the last one allocated here.
            tpu_types: Slice types to try if no other zone has the same type.
            progress: Called with one line per event.

        Raises:
            PodUnavailable: No other zone has the slice, and no other type is available.
            ConfigError: No pod was allocated yet.
        """
        pod = failed or (self._last[0] if self._last else None)
        if pod is None:
            raise ConfigError(
                "request_alternate_pod() needs the pod that failed, because this manager has "
                "allocated none."
            )
        row = self.store.wanted.find_by_any_name(pod.name)
        config = self.complete(PodConfig(tpu_type=str(pod.slice)) if row is None else row.config)
        self.release(pod)
        known = self.opened.capabilities.zones
        alternates = alternates_of(pod, config, tpu_types, known_zones=known, prices=self.prices)
        return Alternate(pod, alternates).take(
            lambda config: self.allocate_pod(config, progress=progress)
        )

    @either_way
    def release(self, pod: Pod | str, *, wait_s: float = RELEASED_WITHIN_S) -> None:
        """Release a pod; return when it is gone, or after `wait_s` while its deletion goes on.

        Args:
            pod: A pod, its name, or the name of the run it is for.
            wait_s: How long to wait.
        """
        name = pod if isinstance(pod, str) else pod.name
        row = self.store.wanted.find_by_any_name(name)
        if row is not None:
            self.store.wanted.release(row.name)
            wait_until_gone(self.reconciler, row.name, wait_s)

    @either_way
    def list(self) -> "Sequence[Pod]":
        """Return the store's pods: of this provider as they are now, of others as last seen."""
        self.reconciler.run_pass()
        return [row.pod for row in self.store.wanted.all() if row.pod is not None]

    @either_way
    def health(self, pod: Pod | str) -> PodHealth:
        """Query the state of a pod."""
        name = pod if isinstance(pod, str) else pod.name
        row = self.store.wanted.find_by_any_name(name)
        if row is None or row.zone is None:
            return PodHealth.unknown(name)
        seen = self.opened.get(row.pod_name, zone=row.zone)
        attempts = self.store.attempts(row.name)
        return PodHealth.of(row, seen, attempts, now=self.store.now())

    @either_way
    def preflight(self, config: PodConfig | None = None) -> Sequence[DoctorFinding]:
        """Return what would prevent a pod from being allocated, without requesting one."""
        request = self.complete(config)
        limits = self.opened.capabilities.limits
        if not limits:
            return self.opened.preflight(request)
        held = self.store.wanted.holds(self.record)
        with contextlib.suppress(TPUError):  # the provider's own findings explain the failure
            held += map(Hold.of, self.opened.list())
        zones = self.opened.capabilities.zones_for(request)
        allowed = [zone for zone in zones if find_refusal(request, zone, limits, held) is None]
        looked_at = self.opened.preflight(replace(request, zones=tuple(allowed or zones)))
        return [*looked_at, *limit_findings(request, zones, limits, held)]

    def complete(self, config: PodConfig | None) -> PodConfig:
        """Return a request with its open values filled in from the settings.

        Raises:
            ConfigError: Neither the request nor the settings name a slice.
        """
        request = config or self.default_config
        if request is None:
            raise ConfigError(
                "No slice is set: give a PodConfig, for example PodConfig(tpu_type='v6e-8'), or "
                "accelerator_type in the configuration."
            )
        return self.settings.complete(request)

    def to_dict(self) -> dict[str, Any]:
        """Return every setting with its source."""
        from ..job.settings import SettingsView

        return SettingsView.of_settings(self.settings).to_dict()
