"""A provider whose every answer is written down, for a run that a supervisor keeps.

The store then knows of the run's pods at all times: they are listed and counted, and deleted by the
next reconciler where the supervisor has died and nobody has come in its place.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...errors import PodUnavailable
from ...runtime.doctor.finding import DoctorFinding
from ..causes import Cause
from ..config import PodConfig
from ..limits import Hold, unavailable
from ..observing import Observer
from ..ownership import OwnedProvider
from ..pod import Pod
from ..prices import zones_within_cap
from ..providers.protocol import Capabilities, Command, Gang, Provider
from ..store import WantedPod
from ..store.records import split_pod_name
from ..supervision.zone_search import ending_of


class RecordedProvider:
    """Passes everything on, and tells the observer.

    Args:
        inner: Who gives pods.
        observer: Who writes down.
        run: Name of the run, whose pod is wanted already.
    """

    def __init__(self, inner: Provider, observer: Observer, run: str) -> None:
        self._inner = OwnedProvider(inner, observer.store.owner)
        self._observer, self._run = observer, run
        self.name = inner.name

    @property
    def capabilities(self) -> Capabilities:
        """What the provider offers: in the run's zones, those that failed lately last."""
        config = self._row().config
        zones = self._inner.capabilities.zones_for(config)
        allowed = zones_within_cap(config, zones, provider=self.name, book=self._observer.prices)
        store = self._observer.store
        ordered = store.history.order(self._observer.provider_id, config, allowed)
        # These zones and no others; limits are kept as each is asked.
        return replace(self._inner.capabilities, zones=tuple(ordered), limits=())

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Ask for a pod in one zone."""
        zone = config.zones[0] if config.zones else ""
        row = replace(self._row(), attempt=split_pod_name(name)[1])
        there = map(Hold.of, self._inner.list()) if self._observer.limits else ()
        refusal = self._observer.asking(replace(row, zone=None, config=config), zone, there)
        if refusal is not None:
            raise unavailable([refusal])
        try:
            pod = self._inner.create(name, config, command=command)
        except PodUnavailable as error:
            self._observer.refused(row, zone, Cause(error.cause), str(error))
            raise
        self._observer.seen(self._row(), pod)
        return pod

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return a pod as it is now, or None where there is none."""
        pod = self._inner.get(name, zone=zone)
        row = self._find()
        if row is not None and row.pod_name == name:
            if pod is not None and pod.state.is_lost and pod != row.pod:
                self._observer.lost(row, zone, ending_of(pod).cause, pod.reason)
            self._observer.seen(row, pod)
        store, provider = self._observer.store, self._observer.provider_id
        store.wanted.keep(self._run)
        store.wanted.answered(provider, is_silent=False)
        if pod is not None:
            store.spend.seen(provider, name)
        return pod

    def list(self, *, owner: str | None = None) -> list[Pod]:
        """Return pods."""
        return self._inner.list(owner=owner)

    def delete(self, name: str, *, zone: str) -> None:
        """Remove a pod."""
        self._inner.delete(name, zone=zone)
        self._observer.deleted(self._run, zone=zone, pod=name)
        row = self._find()
        if row is not None and row.pod_name == name:
            self._observer.store.wanted.observe(self._run, None)

    def start(self, pod: Pod, command: Command, *, attempt: int) -> Gang:
        """Start a process on every host."""
        return self._inner.start(pod, command, attempt=attempt)

    def preflight(self, config: PodConfig) -> Sequence[DoctorFinding]:
        """Say what would stand in the way of a pod."""
        return self._inner.preflight(config)

    def _find(self) -> WantedPod | None:
        """Return what is wanted; None where `pods down` was quicker than the supervisor's end."""
        return self._observer.store.wanted.find(self._run)

    def _row(self) -> WantedPod:
        row = self._find()
        assert row is not None, self._run  # `launch` wants it before and forgets it after
        return row
