"""Passes that make providers match the store. A pass can be interrupted and repeated safely.

A pass records each action before it asks a provider, and every resource has the store's owner label
and a name made from the run and its attempt. So the next pass finds whatever an interrupted one has
created. A pod is deleted only if the same provider record requested it and no run of the store can
still want it. A pod is replaced only after its predecessor is deleted.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from ..errors import PodUnavailable, ProviderError, TPUError
from ..hardware.prices import PriceBook
from .causes import Cause
from .cost import zones_within_cap
from .limits import Hold, Refusal, unavailable
from .observing import Observer, OwnedProvider
from .pod import Pod, PodState
from .providers.protocol import Provider
from .providers.registry import open_provider
from .store import ProviderRecord, Store, WantedPod
from .store.locks import holding, is_held
from .store.records import split_pod_name
from .supervision.zone_search import ending_of

LOCK = "reconciler.lock"
KEEPERS = "keepers"
ANYWHERE = ""
"""The zone of a request without zones, which leaves the choice to the provider."""
WIDTH = 16
"""Number of concurrent calls to providers."""
LATE_S = 600.0
"""How long a provider is still queried after its last pod, in case a creation arrives late. Also
how long a pod waits for a new keeper after its own has died."""


@dataclass
class PassReport:
    """Actions and errors of one pass.

    Attributes:
        was_busy: Another reconciler was running, so nothing was done.
        errors: Errors by run or by provider id; the next pass tries again.
        unknown: Pods with this store's label that the store never requested. They are left alone.
    """

    was_busy: bool = False
    created: list[str] = field(default_factory=list[str])
    deleted: list[str] = field(default_factory=list[str])
    ready: list[str] = field(default_factory=list[str])
    errors: dict[str, TPUError] = field(default_factory=dict[str, TPUError])
    unknown: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "was_busy": self.was_busy,
            "created": self.created,
            "deleted": self.deleted,
            "ready": self.ready,
            "errors": {name: str(error) for name, error in self.errors.items()},
            "unknown": self.unknown,
            "seconds": self.seconds,
        }


class Reconciler:
    """Creates, replaces and deletes pods until providers match the store.

    Args:
        store: The wanted pods, and the record of what happens to them.
        opener: Opens a provider from its record.
        prices: Prices for price caps and spending; by default the public list.
        width: Number of concurrent calls to a provider.
    """

    def __init__(
        self,
        store: Store,
        *,
        opener: Callable[[ProviderRecord], Provider] | None = None,
        prices: PriceBook | None = None,
        width: int = WIDTH,
    ) -> None:
        self.store = store
        self.prices = prices
        self.width = width
        self._opener = opener or (lambda record: open_provider(record.name, record.launch))
        self._opened: dict[str, OwnedProvider] = {}

    def run_pass(self, only: str | None = None) -> PassReport:
        """Do what is missing now, and return a report; only one reconciler runs at a time.

        Args:
            only: Id of the only provider to reconcile; by default all.
        """
        started = time.perf_counter()
        report = PassReport()
        with holding(self.store.folder / LOCK) as mine:
            if not mine:
                return PassReport(was_busy=True)
            for record in self.store.wanted.providers().values():
                if only not in (None, record.id):
                    continue
                if self.store.wanted.forget_unused_provider(record.id, after_s=LATE_S):
                    continue
                try:
                    _ProviderPass(self, record.id, self.provider(record), report).run()
                except TPUError as error:
                    self.store.wanted.answered(record.id, is_silent=True)
                    report.errors[record.id] = error
                    rows = self.store.wanted.all(record.id)
                    report.errors.update((row.name, error) for row in rows)
        report.seconds = time.perf_counter() - started
        return report

    def provider(self, record: ProviderRecord) -> OwnedProvider:
        """Return the open provider of a record; each is opened once."""
        if record.id not in self._opened:
            self._opened[record.id] = OwnedProvider(self._opener(record), self.store.owner)
        return self._opened[record.id]


class _ProviderPass:
    """A pass over the pods of one provider."""

    def __init__(
        self, reconciler: Reconciler, provider_id: str, provider: OwnedProvider, report: PassReport
    ) -> None:
        self.store = reconciler.store
        self.prices = reconciler.prices
        self.width = reconciler.width
        self.id = provider_id
        self.provider = provider
        self.report = report
        self.limits = provider.capabilities.limits
        self.observer = Observer(
            self.store, provider_id, provider.name, reconciler.prices, self.limits
        )
        self.there: Sequence[Hold] = ()  # chips that count against limits
        self.still_there: set[str] = set()  # runs whose stray pod could not be deleted
        self.leaving: list[WantedPod] = []  # pods that this pass has deleted

    def run(self) -> None:
        listed = self._list()
        # Read after the list, because a supervisor records a request before it makes it.
        rows = self.store.wanted.all(self.id)
        current = {(row.zone or "", row.pod_name) for row in rows}
        self.store.wanted.answered(self.id, is_silent=False)
        self.store.spend.end_all_but(self.id, listed.keys() | current)
        self.store.spend.seen(self.id)
        strays = [pod for key, pod in listed.items() if key not in current]
        with ThreadPoolExecutor(self.width) as pool:
            each = map if self.width == 1 else pool.map
            list(each(self._delete_stray, strays))
            # Pods of higher priority get capacity first.
            for _, same in groupby(rows, key=lambda row: row.config.priority):
                list(each(lambda row: self._reconcile(row, listed), same))
        if self.leaving:
            self._forget_gone()

    def _list(self) -> dict[tuple[str, str], Pod]:
        owner = self.store.owner
        if not self.limits:
            ours = self.provider.list(owner=owner)
        else:  # limits apply to the project, so pods of other owners count too
            pods = self.provider.list()
            self.there = [Hold.of(pod) for pod in pods]
            ours = [pod for pod in pods if pod.labels.get("owner") == owner]
        return {(pod.zone, pod.name): pod for pod in ours}

    def _delete_stray(self, pod: Pod) -> None:
        """Delete a pod of this store that no run wants, for example of an earlier attempt."""
        if pod.state is PodState.DELETING or not self._is_stray(pod):
            return
        run, _ = split_pod_name(pod.name)
        try:
            self._delete(run, pod.name, pod.zone, seen=pod)
        except ProviderError as error:
            self.still_there.add(run)
            self.report.errors[run] = error

    def _is_stray(self, pod: Pod) -> bool:
        """Return whether this record requested the pod and no run of the store still wants it."""
        run, attempt = split_pod_name(pod.name)
        row = self.store.wanted.find(run)
        askers = self.store.history.askers(zone=pod.zone, pod=pod.name)
        if self.id not in askers:
            if row is None and not askers & self.store.wanted.providers().keys():
                self.report.unknown.append(f"{pod.name} in {pod.zone}")
            return False
        if row is None:
            return True
        if row.provider != self.id:
            return False
        if row.keeper is not None:  # the keeper acts concurrently; its attempt numbers only grow
            return attempt < row.attempt
        return (row.zone, row.pod_name) != (pod.zone, pod.name)

    def _reconcile(self, row: WantedPod, listed: dict[tuple[str, str], Pod]) -> None:
        try:
            pod = listed.get((row.zone or "", row.pod_name))
            if row.is_released or self._is_abandoned(row):
                self._remove(row, pod)
            elif row.keeper is not None:
                self._observe(row, pod or self._query_again(row))
            elif row.name not in self.still_there:
                self._ensure_pod(row, pod)
        except TPUError as error:
            self.report.errors[row.name] = error

    def _is_abandoned(self, row: WantedPod) -> bool:
        """Return whether the keeper has died without a successor, and the processes with it."""
        if self.provider.capabilities.runs_gangs:  # processes continue without their keeper
            return False
        if row.keeper is None or is_held(self.store.folder / KEEPERS / row.keeper):
            return False
        return self.store.now() - (row.kept_at or row.wanted_at) > LATE_S

    def _remove(self, row: WantedPod, pod: Pod | None) -> None:
        if row.zone is None:
            self._forget(row)
        elif pod is not None and pod.state is PodState.DELETING:
            self._observe(row, pod)
        else:
            self._delete(row.name, row.pod_name, row.zone, seen=pod)
            self.leaving.append(row)

    def _forget_gone(self) -> None:
        """Query all deleted pods once, and forget those that are gone."""
        try:
            left = self._list()
        except ProviderError as error:
            self.report.errors.update((row.name, error) for row in self.leaving)
            return
        for row in self.leaving:
            pod = left.get((row.zone or "", row.pod_name))
            if pod is None:
                self._forget(row)
            else:
                self._observe(row, pod)

    def _forget(self, row: WantedPod) -> None:
        self.store.wanted.forget(row.name)
        self.store.note(row.name, "released", f"{row.pod_name} is gone")

    def _ensure_pod(self, row: WantedPod, pod: Pod | None) -> None:
        pod = pod or self._query_again(row)
        if pod is None and row.pod is None:
            self._place(row)
        elif pod is None:
            self._replace(row, None, Cause.NODE_GONE, "it no longer exists")
        elif pod.state.is_lost:
            self._replace(row, pod, ending_of(pod).cause, pod.reason or f"it is {pod.state}")
        elif pod.state is PodState.WAITING and self._should_ask_elsewhere(row):
            waited = f"not granted within {row.config.queue_timeout_s:g} s"
            self._replace(row, pod, Cause.WAITED_TOO_LONG, waited)
        else:
            self._observe(row, pod)

    def _query_again(self, row: WantedPod) -> Pod | None:
        """Query a known pod that is not in the list, because lists may be outdated."""
        if row.pod is None or row.zone is None:
            return None
        return self.provider.get(row.pod_name, zone=row.zone)

    def _should_ask_elsewhere(self, row: WantedPod) -> bool:
        waited_s = self.store.now() - (row.asked_at or row.wanted_at)
        # With no other zone, a new request would only lose the place in the queue.
        return waited_s > row.config.queue_timeout_s and any(
            zone != row.zone and self.observer.refusal_of(row, zone, self.there) is None
            for zone in self._zones(row)
        )

    def _replace(self, row: WantedPod, pod: Pod | None, cause: Cause, why: str) -> None:
        """Delete a lost pod, or what is left of it, and request another."""
        assert row.zone is not None
        self.observer.record_loss(row, row.zone, cause, why)
        self._delete(row.name, row.pod_name, row.zone, seen=pod)
        self._place(replace(row, attempt=row.attempt + 1, zone=None))

    def _place(self, row: WantedPod) -> None:
        """Ask each zone once, in order, and skip zones that limits rule out.

        The zone of an earlier request comes first, with the same pod name. That pass may have ended
        before the answer came, and there must be only one pod.
        """
        refusals: list[PodUnavailable] = []
        passed_over: list[Refusal] = []
        for zone in self._zones(row):
            if (refusal := self.observer.record_request(row, zone, self.there)) is not None:
                passed_over.append(refusal)
                continue
            refused = self._ask(replace(row, zone=zone), zone)
            if refused is None:
                return
            refusals.append(refused)
            row = replace(row, zone=None)
        if passed_over:
            refusals.append(unavailable(passed_over))
        # A refusal that may change is reported first, because waiting can help.
        may_change = (
            refusal for refusal in refusals if Cause(refusal.cause) is not Cause.UNPLACEABLE
        )
        raise next(may_change, refusals[-1])

    def _zones(self, row: WantedPod) -> Iterable[str]:
        zones = self.provider.capabilities.zones_for(row.config) or (ANYWHERE,)
        allowed = zones_within_cap(row.config, zones, provider=self.provider.name, book=self.prices)
        ordered = self.store.history.order(self.id, row.config, allowed)
        return ordered if row.zone is None else dict.fromkeys((row.zone, *ordered))

    def _ask(self, row: WantedPod, zone: str) -> PodUnavailable | None:
        """Request a pod in a zone; return the refusal, or None."""
        labels = {"job": row.name, "attempt": str(row.attempt)}
        config = replace(row.config.with_labels(**labels), zones=(zone,) if zone else ())
        try:
            pod = self.provider.create(row.pod_name, config)
            if pod.state.is_lost:
                self._delete(row.name, pod.name, pod.zone, seen=pod)
                why = pod.reason or f"{pod.name} is {pod.state} in {zone}."
                raise PodUnavailable(why, cause=ending_of(pod).cause.value)
        except PodUnavailable as error:
            self.observer.record_refusal(row, zone, Cause(error.cause), str(error))
            return error
        self.store.note(row.name, "asked", f"{row.pod_name} ({row.config.slice}) in {zone}")
        self.report.created.append(pod.name)
        self._observe(replace(row, pod=None), pod)
        return None

    def _observe(self, row: WantedPod, pod: Pod | None) -> None:
        if pod is not None and pod.is_ready:
            self.report.ready.append(row.name)
        self.observer.record_state(row, pod)

    def _delete(self, run: str, name: str, zone: str, *, seen: Pod | None) -> None:
        if seen is None:
            self.provider.delete(name, zone=zone)
        else:
            self.provider.delete_seen(seen)
        self.observer.record_deletion(run, zone=zone, pod=name)
        self.report.deleted.append(name)
