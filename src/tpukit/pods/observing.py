"""Writing down what happens to pods: events, states, how long they lived and what they cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..hardware.prices import PriceBook
from ..job.sections import ChipLimit
from .causes import Cause
from .limits import Hold, Refusal, find_refusal
from .pod import Pod
from .prices import price_of
from .store import Store, WantedPod


@dataclass(frozen=True)
class Observer:
    """Tells the store of one provider's pods, each thing once however often it is seen."""

    store: Store
    provider_id: str
    provider: str
    prices: PriceBook | None = None
    limits: Sequence[ChipLimit] = ()

    def asking(self, row: WantedPod, zone: str, there: Iterable[Hold] = ()) -> Refusal | None:
        """A pod is about to be asked for in a zone, under the name of its attempt.

        Args:
            row: With the zone it is asked for in already, if any.
            zone: Where.
            there: What the project holds as its provider shows it; it counts against limits.

        Returns:
            Why it is not to be asked for there, or None.
        """
        with self.store.wanted.database.writing():  # nobody else takes the same chips meanwhile
            if row.zone != zone:
                if (refusal := self.refusal_of(row, zone, there)) is not None:
                    self.store.note(row.name, "passed_over", f"{row.pod_name}: {refusal.why}")
                    return refusal
                self.store.wanted.ask_in(row.name, zone=zone, attempt=row.attempt)
            self.store.history.asked(self.provider_id, row.config, zone=zone, pod=row.pod_name)
        return None

    def refusal_of(self, row: WantedPod, zone: str, there: Iterable[Hold] = ()) -> Refusal | None:
        """Return why limits do not allow a pod in a zone, or None."""
        if not self.limits:
            return None
        wanted = self.store.wanted
        held = wanted.holds(wanted.providers()[self.provider_id], besides=row.name)
        held += [one for one in there if (one.zone, one.pod) != (zone, row.pod_name)]
        return find_refusal(row.config, zone, self.limits, held)

    def refused(self, row: WantedPod, zone: str, cause: Cause, why: str) -> None:
        """A zone said no: nothing is there."""
        self.store.wanted.ask_nowhere(row.name)
        self._ended(row.pod_name, zone, cause)
        self.store.note(row.name, "refused", f"{row.pod_name} in {zone}: {why}")

    def seen(self, row: WantedPod, pod: Pod | None) -> None:
        """A pod was looked at; None: it is not there."""
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

    def lost(self, row: WantedPod, zone: str, cause: Cause, why: str) -> None:
        """A pod is of no use any more, and is to be replaced."""
        self._ended(row.pod_name, zone, cause)
        self.store.note(row.name, "lost", f"{row.pod_name} in {zone}: {cause.meaning}; {why}")

    def deleted(self, run: str, *, zone: str, pod: str) -> None:
        """A pod was deleted, and costs nothing from now on."""
        self._ended(pod, zone, Cause.STOPPED)
        self.store.note(run, "deleted", f"{pod} in {zone}")

    def _ended(self, pod: str, zone: str, cause: Cause) -> None:
        self.store.spend.end(self.provider_id, zone=zone, pod=pod)
        self.store.history.ended(self.provider_id, zone=zone, pod=pod, cause=cause)


def _is_news(before: Pod | None, now: Pod) -> bool:
    """Whether a pod came into another state, or is told of something to come, as maintenance."""
    if before is None or before.state is not now.state:
        return True
    return now.is_ready and now.reason not in ("", before.reason)
