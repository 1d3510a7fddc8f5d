"""Record what happens to pods: events, states, lifetimes and costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..hardware.prices import PriceBook
from ..job.sections import ChipLimit
from ..runtime.doctor.finding import DoctorFinding
from .causes import Cause
from .config import PodConfig
from .cost import price_of
from .limits import Hold, Refusal, find_refusal
from .pod import Pod
from .providers.protocol import Capabilities, Command, Gang, Provider
from .store import Store, WantedPod

OWNER = "owner"


class OwnedProvider:
    """A provider that creates and deletes only the pods of one store.

    Args:
        inner: The provider.
        owner: The store's label.
    """

    def __init__(self, inner: Provider, owner: str) -> None:
        self._inner, self._owner = inner, owner
        self.name = inner.name

    @property
    def capabilities(self) -> Capabilities:
        """The provider's capabilities."""
        return self._inner.capabilities

    def is_ours(self, pod: Pod) -> bool:
        """Whether the pod carries the store's label."""
        return pod.labels.get(OWNER) == self._owner

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Create a pod with the store's label.

        Raises:
            ConfigError: A pod of that name exists and belongs to another store or a person.
        """
        owned = config.with_labels(**{OWNER: self._owner})
        pod = self._inner.create(name, owned, command=command)
        if not self.is_ours(pod):
            raise ConfigError(
                f"A pod named {name!r} already exists in {pod.zone or 'this place'} and belongs "
                f"to {pod.labels.get(OWNER) or 'an unknown owner'}, not to this store; choose "
                "another name (--name)."
            )
        return pod

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return the store's pod of that name, or None."""
        pod = self._inner.get(name, zone=zone)
        return pod if pod is not None and self.is_ours(pod) else None

    def list(self, *, owner: str | None = None) -> "list[Pod]":
        """Return all pods, or those with an owner's label."""
        return self._inner.list(owner=owner)

    def delete(self, name: str, *, zone: str) -> None:
        """Delete the store's pod of that name, or the remains of a failed creation."""
        pod = self._inner.get(name, zone=zone)
        if pod is None or self.is_ours(pod):
            self._inner.delete(name, zone=zone)

    def delete_seen(self, pod: Pod) -> None:
        """Delete a pod that the provider has just listed, without querying it again."""
        assert self.is_ours(pod), pod.name
        self._inner.delete(pod.name, zone=pod.zone)

    def start(self, pod: Pod, command: Command, *, attempt: int) -> Gang:
        """Start a process on every host."""
        return self._inner.start(pod, command, attempt=attempt)

    def preflight(self, config: PodConfig) -> Sequence[DoctorFinding]:
        """Return what would prevent a pod from being allocated."""
        return self._inner.preflight(config)


@dataclass(frozen=True)
class Observer:
    """Records the changes of one provider's pods in the store, each change once."""

    store: Store
    provider_id: str
    provider: str
    prices: PriceBook | None = None
    limits: Sequence[ChipLimit] = ()

    def record_request(
        self, row: WantedPod, zone: str, there: Iterable[Hold] = ()
    ) -> Refusal | None:
        """Record that a pod is about to be requested in a zone, unless limits rule it out.

        Args:
            row: The wanted pod, with its present zone if it has one.
            zone: The zone.
            there: Chips of the project that the provider lists; they count against limits.

        Returns:
            Why limits rule it out, or None.
        """
        with self.store.wanted.database.writing():  # so that no other process takes the same chips
            if row.zone != zone:
                if (refusal := self.refusal_of(row, zone, there)) is not None:
                    self.store.note(row.name, "passed_over", f"{row.pod_name}: {refusal.why}")
                    return refusal
                self.store.wanted.ask_in(row.name, zone=zone, attempt=row.attempt)
            self.store.history.asked(self.provider_id, row.config, zone=zone, pod=row.pod_name)
        return None

    def refusal_of(self, row: WantedPod, zone: str, there: Iterable[Hold] = ()) -> Refusal | None:
        """Return why limits rule out a pod in a zone, or None."""
        if not self.limits:
            return None
        wanted = self.store.wanted
        held = wanted.holds(wanted.providers()[self.provider_id], besides=row.name)
        held += [hold for hold in there if (hold.zone, hold.pod) != (zone, row.pod_name)]
        return find_refusal(row.config, zone, self.limits, held)

    def record_refusal(self, row: WantedPod, zone: str, cause: Cause, why: str) -> None:
        """Record that a zone refused the request."""
        self.store.wanted.ask_nowhere(row.name)
        self._ended(row.pod_name, zone, cause)
        self.store.note(row.name, "refused", f"{row.pod_name} in {zone}: {why}")

    def record_state(self, row: WantedPod, pod: Pod | None) -> None:
        """Record the state of a pod; None means that it does not exist."""
        if pod == row.pod:
            return
        if pod is not None and pod.is_ready:
            price = price_of(row.config, zone=pod.zone, provider=self.provider, book=self.prices)
            self.store.spend.begin(row.name, self.provider_id, pod, price)
            self.store.history.ready(self.provider_id, zone=pod.zone, pod=pod.name)
        if pod is not None and _is_news(row.pod, pod):
            why = f": {pod.reason}" if pod.reason else ""
            self.store.note(row.name, pod.state.value, f"{pod.name} in {pod.zone}{why}")
        self.store.wanted.observe(row.name, pod)

    def record_loss(self, row: WantedPod, zone: str, cause: Cause, why: str) -> None:
        """Record that a pod is lost and will be replaced."""
        self._ended(row.pod_name, zone, cause)
        self.store.note(row.name, "lost", f"{row.pod_name} in {zone}: {cause.meaning}; {why}")

    def record_deletion(self, run: str, *, zone: str, pod: str) -> None:
        """Record that a pod was deleted and costs nothing from now on."""
        self._ended(pod, zone, Cause.STOPPED)
        self.store.note(run, "deleted", f"{pod} in {zone}")

    def _ended(self, pod: str, zone: str, cause: Cause) -> None:
        self.store.spend.end(self.provider_id, zone=zone, pod=pod)
        self.store.history.ended(self.provider_id, zone=zone, pod=pod, cause=cause)


def _is_news(before: Pod | None, now: Pod) -> bool:
    """Return whether the state changed, or a reason such as maintenance was added."""
    if before is None or before.state is not now.state:
        return True
    return now.is_ready and now.reason not in ("", before.reason)
