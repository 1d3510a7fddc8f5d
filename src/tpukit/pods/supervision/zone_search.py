"""Get a pod: ask zone after zone, each within its time limit."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from ...errors import PodUnavailable, ProviderError, ProviderSilent
from ..causes import Cause, Ending, Kind
from ..config import PodConfig
from ..pod import Pod, PodState, Tier
from ..providers.protocol import Command, Provider
from .journal import PodAsked, PodReady, PodRefused, PodReleased, SupervisionEvent
from .policy import LONGEST_PAUSE_S, Policy

T = TypeVar("T")
SOON_S = 0.1
"""First pause after a request; later pauses grow."""


class Stopped(Exception):
    """A stop was requested while waiting for a pod."""


class NoPod(Exception):
    """No zone grants a pod, and waiting is not allowed or would not help."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        super().__init__(str(ending))


class ZoneSearch:
    """Requests pods from a provider for one job.

    Args:
        tell: Called with every event.
        stopping: Event that ends the search.
    """

    def __init__(
        self,
        provider: Provider,
        policy: Policy,
        *,
        tell: Callable[[SupervisionEvent], None],
        stopping: threading.Event,
    ) -> None:
        self._provider, self._policy = provider, policy
        self._tell, self._stopping = tell, stopping
        # A cluster's own queue is waited for without limit, and so is its API: the job may run.
        self.is_leaving = False  # whether a stop leaves the pod as it is
        self._is_patient = provider.capabilities.runs_gangs

    def zones(self, config: PodConfig) -> Sequence[str]:
        """Return the zones to ask, in order; "" is the provider's own."""
        return self._provider.capabilities.zones_for(config) or ("",)

    def get(
        self,
        name: str,
        config: PodConfig,
        *,
        command: Command,
        asking: Callable[[str], object],
    ) -> Pod:
        """Return a ready pod.

        Args:
            name: Pod name; the same name finds an earlier request.
            config: The request, with zones in the order to ask.
            command: The command, for providers that run gangs themselves.
            asking: Called with each zone before it is asked, to record it.

        Raises:
            NoPod: No pod is available; the error has the cause.
            Stopped: A stop was requested.
            ProviderError: The provider cannot be reached, or rejects the credentials.
        """
        deadline = time.monotonic() + self._policy.patience_s
        pause_s = 1.0
        while True:
            refusals: list[Ending] = []
            for zone in self.zones(config):
                asking(zone)
                self._tell(PodAsked(name, zone))
                answer = self._ask(name, config if not zone else config.in_zone(zone), command)
                if isinstance(answer, Pod):
                    self._tell(PodReady(answer))
                    return answer
                refusals.append(answer)
                self._tell(PodRefused(name, zone, answer.cause, answer.evidence))
            hopeless = all(refusal.cause is Cause.UNPLACEABLE for refusal in refusals)
            if hopeless or time.monotonic() + pause_s > deadline:
                text = "; ".join(dict.fromkeys(refusal.evidence for refusal in refusals))
                raise NoPod(replace(refusals[0], evidence=text))
            self._pause(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def look(self, pod: Pod) -> Pod | None:
        """Return the pod's present state, or None if it is gone; retry during outages.

        Raises:
            ProviderError: The provider, which does not run gangs itself, did not answer for longer
                than `Policy.outage_s`.
            Stopped: A stop was requested.
        """
        return self._repeated(
            lambda: self._provider.get(pod.name, zone=pod.zone),
            only=ProviderError,
            limit_s=math.inf if self._is_patient else self._policy.outage_s,
        )

    def release(self, pod: Pod) -> None:
        """Delete a pod."""
        self._provider.delete(pod.name, zone=pod.zone)
        self._tell(PodReleased(pod))

    def _repeated(self, call: Callable[[], T], *, only: type[ProviderError], limit_s: float) -> T:
        """Repeat an idempotent call while the provider does not answer.

        Args:
            call: The call.
            only: Errors after which it is repeated.
            limit_s: Seconds after which the error is raised.
        """
        deadline = time.monotonic() + limit_s
        pause_s = SOON_S
        while True:
            try:
                return call()
            except only:
                if time.monotonic() + pause_s > deadline:
                    raise
            self._pause(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _ask(self, name: str, config: PodConfig, command: Command) -> Pod | Ending:
        """Request a pod in one zone; return it when ready, or why there is none."""
        try:
            # The name makes a second request find the first one's pod.
            pod = self._repeated(
                lambda: self._provider.create(name, config, command=command),
                only=ProviderSilent,
                limit_s=self._policy.outage_s,
            )
        except PodUnavailable as refused:
            return Ending(Cause(refused.cause), evidence=str(refused))
        return self.wait_ready(pod, math.inf if self._is_patient else config.queue_timeout_s)

    def wait_ready(self, pod: Pod, timeout_s: float) -> Pod | Ending:
        """Wait until a pod is ready, and return it; delete it and return why if it never will be.

        Raises:
            Stopped: A stop was requested, and the pod was deleted.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = min(SOON_S, self._policy.poll_s)
        try:
            while not pod.is_ready:
                if pod.state.is_lost:
                    self.release(pod)
                    return ending_of(pod)
                if time.monotonic() > deadline:
                    self.release(pod)
                    late = f"still {pod.state} after {timeout_s:g} s"
                    why = f"{late}: {pod.reason}" if pod.reason else late
                    return Ending(Cause.WAITED_TOO_LONG, evidence=why)
                self._pause(pause_s)
                pause_s = min(self._policy.poll_s, 2 * pause_s)
                pod = self.look(pod) or replace(pod, state=PodState.FAILED, reason="it is gone")
        except Stopped:
            if not self.is_leaving:
                self.release(pod)
            raise
        return pod

    def _pause(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise Stopped


def ending_of(pod: Pod) -> Ending:
    """Return why a lost pod was lost, as far as its state shows."""
    reason = pod.reason or f"the pod is {pod.state}"
    if pod.cause is not None:
        return Ending(pod.cause, evidence=reason)
    if pod.state is PodState.SUSPENDED:
        taken = Cause.SPOT if pod.tier is Tier.SPOT else Cause.MAINTENANCE
        return Ending(taken, evidence=reason)
    # Providers put a known cause first: "stockout: no more v6e".
    word = reason.partition(":")[0]
    known = {cause.value: cause for cause in Cause if cause.kind in (Kind.CAPACITY, Kind.EVICTION)}
    return Ending(known.get(word, Cause.NODE_GONE), evidence=reason)


class PodWatch:
    """Queries a pod regularly in its own thread, while a gang runs on it."""

    def __init__(self, provider: Provider, pod: Pod, every_s: float) -> None:
        self._provider, self._pod, self._every_s = provider, pod, every_s
        self._ended = threading.Event()
        self.lost: Pod | None = None
        self._thread = threading.Thread(target=self._poll, name="tpukit-pod-watch", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                now = self._provider.get(self._pod.name, zone=self._pod.zone)
            except ProviderError:
                continue  # processes may well continue during an API outage
            if now is None:
                self.lost = self._pod.in_state(PodState.FAILED, "the pod is gone")
            elif now.state.is_lost:
                self.lost = now
            if self.lost is not None:
                return

    def close(self) -> None:
        """Stop the queries."""
        self._ended.set()
