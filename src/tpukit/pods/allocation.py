"""Allocate one pod: record the request, reconcile until it is ready, and clean up on failure."""

import contextlib
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PodUnavailable, ProviderError, TPUError
from ..hardware.prices import PriceBook
from ..runtime.interruption import undone_if_interrupted
from ..runtime.progress import Progress
from .causes import Cause
from .config import PodConfig
from .cost import catalogue_age, price_of, zones_within_cap
from .limits import Hold, zones_within_limits
from .pod import Pod
from .providers.protocol import Provider, check_terms
from .reconciler import Reconciler
from .store import ProviderRecord

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 10.0
PATIENCE = 20
"""Consecutive failures to tolerate while a pod is queued, because waiting loses nothing there."""
SHORT_PATIENCE = 2
"""Consecutive failures to tolerate before the provider has shown the pod."""
_UNDO_S = 1.0


@dataclass(frozen=True)
class Allocation:
    """The request for one pod until it is ready."""

    reconciler: Reconciler
    provider: Provider
    record: ProviderRecord
    name: str
    config: PodConfig

    def run(self, *, wait_s: float | None, progress: Progress) -> Pod:
        """Wait until the pod is ready, and return it.

        Raises:
            PodUnavailable: Every zone refused the request, and `wait_s` is over.
            ProviderError: The provider cannot be reached, or rejects the credentials.
        """
        wanted = self.reconciler.store.wanted
        # Capacity that is in use now may become free while the caller waits.
        held = wanted.holds(self.record, besides=self.name) if wait_s is None else []
        prices = self.reconciler.prices
        check_request(self.config, self.provider, prices, held=held, progress=progress)
        wanted.want(self.name, self.config, self.record)
        try:
            with undone_if_interrupted(lambda: wanted.release(self.name)):
                return self._wait(wait_s, progress)
        except BaseException:  # also on Ctrl-C: otherwise the pod would be left behind
            self._give_up()
            raise

    def _give_up(self) -> None:
        wanted = self.reconciler.store.wanted
        row = wanted.find(self.name)
        if row is not None and row.zone is None:
            wanted.forget(self.name)  # no zone was asked, so no pod can exist
            return
        wanted.release(self.name)
        with contextlib.suppress(TPUError):  # the next reconciler pass deletes it
            wait_until_gone(self.reconciler, self.name, _UNDO_S)

    def _wait(self, wait_s: float | None, progress: Progress) -> Pod:
        store = self.reconciler.store
        started = time.monotonic()
        shown = len(store.events(self.name))
        failures = 0
        pause_s = FIRST_PAUSE_S
        while True:
            report = self.reconciler.run_pass(only=self.record.id)
            for event in store.events(self.name, after=shown):
                progress(f"{self.name}: {event.kind}, {event.text}")
                shown += 1
            row = store.wanted.find(self.name)
            if row is None or row.is_released:
                raise PodUnavailable(
                    f"{self.name} was released by another process before it was ready."
                )
            if row.pod is not None and row.pod.is_ready:
                return row.pod
            error = report.errors.get(self.name)
            failures = failures + 1 if isinstance(error, ProviderError) else 0
            if isinstance(error, PodUnavailable):
                hopeless = Cause(error.cause) is Cause.UNPLACEABLE
                if hopeless or wait_s is None or time.monotonic() - started > wait_s:
                    raise error
            elif isinstance(error, ProviderError):
                # A single lost reply is retried. A provider that never answered is unreachable.
                patience = PATIENCE if row.pod is not None else SHORT_PATIENCE
                never_answered = self.record.id in report.errors and row.zone is None
                if never_answered or failures > patience:
                    raise error
            elif error is not None:
                raise error
            time.sleep(pause_s * random.uniform(0.7, 1.3))
            pause_s = min(LONGEST_PAUSE_S, pause_s * 1.5)


def check_request(
    config: PodConfig,
    provider: Provider,
    prices: PriceBook | None,
    *,
    held: Sequence[Hold],
    progress: Progress,
) -> None:
    """Refuse a request that the provider, the limits or the price cap rule out; report the price.

    Args:
        config: The request.
        provider: The provider that would be asked.
        prices: Prices to compare the price cap with.
        held: Chips that already count against `launch.limits`.
        progress: Called with each zone that is skipped, and with the price.

    Raises:
        ConfigError: The provider does not offer the requested terms.
        PodUnavailable: The provider has no such chips, or none within the limits and the price cap.
    """
    offered, where = provider.capabilities, config.slice
    check_terms(provider.name, offered, config)
    if offered.generations and where.chip.name not in offered.generations:
        why = offered.refused.get(where.chip.name)
        raise PodUnavailable(
            f"'{provider.name}' has no {where.chip.name}{f' ({why})' if why else ''}; it has "
            f"{', '.join(offered.generations)}. Try another provider, for example --provider gke.",
            cause=Cause.UNPLACEABLE.value,
        )
    zones = zones_within_limits(
        config, offered.zones_for(config), limits=offered.limits, held=held, progress=progress
    )
    for zone in zones_within_cap(config, zones, provider=provider.name, book=prices)[:1]:
        price = price_of(config, zone=zone, provider=provider.name, book=prices)
        if price.value is not None:
            progress(
                f"{where} {config.tier} in {zone} is ${price.value:.2f} per hour "
                f"({catalogue_age(price)})"
            )


def wait_until_gone(
    reconciler: Reconciler, name: str, wait_s: float, *, patience: float = math.inf
) -> None:
    """Reconcile until a released pod is gone; after `wait_s`, leave its deletion to later passes.

    Args:
        reconciler: The reconciler that deletes it.
        name: Name of the run.
        wait_s: How long to wait.
        patience: Consecutive failures after which the provider counts as unreachable.

    Raises:
        TPUError: The provider could not be opened or reached within these limits.
    """
    deadline = time.monotonic() + wait_s
    pause_s, failures = FIRST_PAUSE_S, 0
    while (row := reconciler.store.wanted.find(name)) is not None:
        report = reconciler.run_pass(only=row.provider)
        if reconciler.store.wanted.find(name) is None:
            return
        error = report.errors.get(name)
        failures = 0 if error is None else failures + 1
        if time.monotonic() > deadline or failures > patience:
            if error is not None:
                raise error
            return
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, pause_s * 1.5)
