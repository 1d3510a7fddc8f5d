"""`TpuManager`: gets pods, knows them, gives them back (document 004)."""

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from ..errors import ConfigError, TPUError
from ..hardware.prices import PriceBook
from ..job.config import TPUConfig
from ..job.document import Origin
from ..job.sections import LaunchSettings
from ..runtime.calls import either_way
from ..runtime.doctor.finding import DoctorFinding
from ..runtime.progress import Progress, silent
from ..shown import Shown
from .allocation import Allocation, wait_until_gone
from .alternates import Alternate, alternates_of
from .config import PodConfig
from .health import PodHealth
from .limits import Hold, find_refusal, limit_findings
from .pod import Pod, check_name
from .preemptible import POLL_S, PreemptionWatch
from .providers.protocol import Provider
from .providers.registry import open_provider
from .reconciler import Reconciler
from .settings import PodSettings
from .store import ProviderRecord, Store
from .supervision.preemption import PreemptionHandler

RELEASED_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class TpuManager(Shown):
    """Gets pods from a provider, in keywords or step by step.

    ```python
    manager = TpuManager().with_project("p").with_zone("us-central1-a").build()
    manager = TpuManager(provider="gcp", project="p", zone="us-central1-a")
    pod = manager.allocate_pod(PodConfig(tpu_type="v6e-8"))
    ```

    What is not given here comes from the environment (TPUKIT_PROVIDER, TPU_PROJECT, TPU_ZONE,
    TPU_NETWORK, GOOGLE_APPLICATION_CREDENTIALS), then from `launch`; `origin_of` says which. Its
    calls block, and in a coroutine they are awaited.

    Attributes:
        provider: local, gcp, gke, gce or ssh.
        launch: A job's `launch:` section, or nothing.
        state: What is remembered between processes; by default the user's own store.
        prices: By default the public list.
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
        """Ask this provider."""
        return replace(self, provider=provider)

    def with_project(self, project: str) -> Self:
        """Ask in this project."""
        return replace(self, project=project)

    def with_zone(self, *zones: str) -> Self:
        """Ask in these zones, in this order."""
        return replace(self, zone=zones[0] if zones else None, zones=zones[1:])

    def with_network(self, network: str) -> Self:
        """Connect pods to this network."""
        return replace(self, network=network)

    def with_credentials(self, file: str) -> Self:
        """Ask as the account whose key is in a file."""
        return replace(self, credentials_file=file)

    def with_endpoint(self, endpoint: str) -> Self:
        """Speak to an API at this address, such as an emulator's."""
        return replace(self, endpoint=endpoint)

    def with_launch(self, launch: LaunchSettings) -> Self:
        """Take what is not said here from a job's launch section."""
        return replace(self, launch=launch)

    def with_prices(self, prices: PriceBook) -> Self:
        """Hold caps against these prices, and count with them."""
        return replace(self, prices=prices)

    @either_way
    def build(self) -> Self:
        """Check the settings, open the provider, and return the manager."""
        _ = self.opened
        return self

    @classmethod
    @either_way
    def from_config(cls, config: TPUConfig, **arguments: Any) -> "TpuManager":
        """Make a manager from document 004's flat settings; its slice is what is allocated.

        Args:
            config: As `TPUConfig.from_file("tpu_config.yaml")` reads it.
            **arguments: Of `TpuManager`, which go before the environment and the file.
        """
        named = {name: arguments[name] for name in arguments if name in PodSettings.model_fields}
        settings = PodSettings.of_config(config, named)
        asked = None
        if config.slice is not None:
            asked = PodConfig(tpu_type=str(config.slice))
        return cls(gathered=settings, default_config=asked, **arguments).build()

    # --- what holds ------------------------------------------------------------------------

    @cached_property
    def settings(self) -> PodSettings:
        """What holds, after the launch section, the environment and arguments."""
        if self.gathered is not None:
            return self.gathered
        section = {} if self.launch is None else self.launch.model_dump(exclude_unset=True)
        names = ("provider", "project", "zone", "network", "credentials_file", "endpoint")
        said: dict[str, Any] = {name: getattr(self, name) for name in names}
        return PodSettings.gather(section, said | {"zones": self.zones or None})

    def origin_of(self, name: str) -> Origin:
        """Return where the value of a setting came from."""
        return self.settings.origin_of(name)

    @cached_property
    def opened(self) -> Provider:
        """The provider."""
        return open_provider(self.settings.provider_name, self.settings)

    @cached_property
    def store(self) -> Store:
        """What is remembered between processes."""
        return self.state or Store()

    @cached_property
    def record(self) -> ProviderRecord:
        """How the store knows the provider."""
        return ProviderRecord.of(self.settings.provider_name, self.settings)

    @cached_property
    def reconciler(self) -> Reconciler:
        """Who brings about what is wanted."""

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
            config: What is asked for; what it leaves open comes from the settings. By default the
                slice that the configuration names.
            name: Of the run it is for; made up by default. Asking again under the same name gives
                the same pod.
            wait_s: How long to go on asking when every zone has refused; by default not at all.
            progress: Told what happens, a line each.

        Raises:
            ConfigError: No provider accepts the name.
            PodUnavailable: No zone has it, or none within the price cap; nothing is left behind.
            ProviderError: The provider cannot be reached, or refuses who asks.
        """
        asked = self.complete(config)
        run = check_name(name or f"tpu-{asked.slice.chip.name.lower()}-{secrets.token_hex(3)}")
        allocation = Allocation(self.reconciler, self.opened, self.record, run, asked)
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
        """Get a spot pod, and have a handler told when it is taken away.

        With `auto_restart` the handler is given the pod that comes in its place. `close()` ends
        the looking.
        """
        asked = config.with_preemptible()
        handler = None if preemption_handler is None else preemption_handler.build()
        pod = self.allocate_pod(asked, name=name, wait_s=wait_s, progress=progress)
        if handler is not None:
            self._watches.append(PreemptionWatch(self, pod, handler, poll_s=poll_s))
        return pod

    def close(self) -> None:
        """Look after no pod any more; the pods stay."""
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
        """Get a pod in place of one that failed: in another zone, or of another type.

        Args:
            failed: By default the last one that was allocated here. It is given back.
            tpu_types: Types to take where no other zone has the same one.
            progress: Told what happens, a line each.

        Raises:
            PodUnavailable: No other zone and none of the types is to be had.
            ConfigError: Nothing was allocated yet.
        """
        pod = failed or (self._last[0] if self._last else None)
        if pod is None:
            raise ConfigError(
                "request_alternate_pod() needs the pod that failed, as none was allocated here."
            )
        row = self.store.wanted.find_by_any_name(pod.name)
        config = self.complete(PodConfig(tpu_type=str(pod.slice)) if row is None else row.config)
        self.release(pod)
        known = self.opened.capabilities.zones
        alternates = alternates_of(pod, config, tpu_types, known_zones=known, prices=self.prices)
        return Alternate(pod, alternates).take(
            lambda one: self.allocate_pod(one, progress=progress)
        )

    @either_way
    def release(self, pod: Pod | str, *, wait_s: float = RELEASED_WITHIN_S) -> None:
        """Give a pod back, and return when it is gone, or on its way where that takes long.

        Args:
            pod: A pod, its name, or the name of the run it is for.
            wait_s: How long to look.
        """
        name = pod if isinstance(pod, str) else pod.name
        row = self.store.wanted.find_by_any_name(name)
        if row is not None:
            self.store.wanted.release(row.name)
            wait_until_gone(self.reconciler, row.name, wait_s)

    @either_way
    def list(self) -> "Sequence[Pod]":
        """Return this store's pods as they are now; those of other providers as last seen."""
        self.reconciler.run_pass()
        return [row.pod for row in self.store.wanted.all() if row.pod is not None]

    @either_way
    def health(self, pod: Pod | str) -> PodHealth:
        """Look at a pod now."""
        name = pod if isinstance(pod, str) else pod.name
        row = self.store.wanted.find_by_any_name(name)
        if row is None or row.zone is None:
            return PodHealth.unknown(name)
        seen = self.opened.get(row.pod_name, zone=row.zone)
        attempts = self.store.attempts(row.name)
        return PodHealth.of(row, seen, attempts, now=self.store.now())

    @either_way
    def preflight(self, config: PodConfig | None = None) -> Sequence[DoctorFinding]:
        """Say what would stand in the way of a pod, without asking for one."""
        asked = self.complete(config)
        limits = self.opened.capabilities.limits
        if not limits:
            return self.opened.preflight(asked)
        held = self.store.wanted.holds(self.record)
        with contextlib.suppress(TPUError):  # the provider's own findings say why it shows nothing
            held += map(Hold.of, self.opened.list())
        zones = self.opened.capabilities.zones_for(asked)
        allowed = [one for one in zones if find_refusal(asked, one, limits, held) is None]
        looked_at = self.opened.preflight(replace(asked, zones=tuple(allowed or zones)))
        return [*looked_at, *limit_findings(asked, zones, limits, held)]

    def complete(self, config: PodConfig | None) -> PodConfig:
        """Return what is asked for, with what it leaves open filled in from the settings.

        Raises:
            ConfigError: No slice is named anywhere.
        """
        asked = config or self.default_config
        if asked is None:
            raise ConfigError(
                "Nothing says which slice: give a PodConfig, for example "
                "PodConfig(tpu_type='v6e-8'), or accelerator_type in the configuration."
            )
        return self.settings.complete(asked)

    def to_dict(self) -> Mapping[str, Any]:
        """Return every setting with where it came from."""
        from ..job.view import SettingsView

        return SettingsView.of_settings(self.settings).to_dict()
