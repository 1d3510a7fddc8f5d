"""Getting one pod: want it, reconcile until it is ready, and leave nothing where it fails."""

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
from .limits import Hold, zones_within_limits
from .pod import Pod
from .prices import catalogue_age, price_of, zones_within_cap
from .providers.protocol import Provider
from .providers.terms import check_terms
from .reconciler import Reconciler
from .store import ProviderRecord

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 10.0
PATIENCE = 20
"""Failures in a row that are borne while a pod is in a queue, where nothing is lost by waiting."""
SHORT_PATIENCE = 2
"""The same while nothing was seen of it yet."""
_UNDO_S = 1.0


@dataclass(frozen=True)
class Allocation:
    """One pod on its way."""

    reconciler: Reconciler
    provider: Provider
    record: ProviderRecord
    name: str
    config: PodConfig

    def run(self, *, wait_s: float | None, progress: Progress) -> Pod:
        """Return the pod when it is ready.

        Raises:
            PodUnavailable: Every zone refused, and `wait_s` is over.
            ProviderError: The provider cannot be reached, or refuses who asks.
        """
        wanted = self.reconciler.store.wanted
        # Who waits may get what others hold now.
        held = wanted.holds(self.record, besides=self.name) if wait_s is None else []
        prices = self.reconciler.prices
        check_request(self.config, self.provider, prices, held=held, progress=progress)
        wanted.want(self.name, self.config, self.record)
        try:
            with undone_if_interrupted(lambda: wanted.release(self.name)):
                return self._wait(wait_s, progress)
        except BaseException:  # also Ctrl-C: nobody would know of the pod
            self._give_up()
            raise

    def _give_up(self) -> None:
        wanted = self.reconciler.store.wanted
        row = wanted.find(self.name)
        if row is not None and row.zone is None:
            wanted.forget(self.name)  # nothing can be there: it is asked for nowhere
            return
        wanted.release(self.name)
        with contextlib.suppress(TPUError):  # the next pass of anybody deletes it
            wait_until_gone(self.reconciler, self.name, _UNDO_S)

    def _wait(self, wait_s: float | None, progress: Progress) -> Pod:
        store = self.reconciler.store
        started = time.monotonic()
        told = len(store.events(self.name))
        failures = 0
        pause_s = FIRST_PAUSE_S
        while True:
            report = self.reconciler.run_pass(only=self.record.id)
            for event in store.events(self.name, after=told):
                progress(f"{self.name}: {event.kind}, {event.text}")
                told += 1
            row = store.wanted.find(self.name)
            if row is None or row.is_released:
                raise PodUnavailable(f"{self.name} was given back while it was waited for.")
            if row.pod is not None and row.pod.is_ready:
                return row.pod
            error = report.errors.get(self.name)
            failures = failures + 1 if isinstance(error, ProviderError) else 0
            if isinstance(error, PodUnavailable):
                hopeless = Cause(error.cause) is Cause.UNPLACEABLE
                if hopeless or wait_s is None or time.monotonic() - started > wait_s:
                    raise error
            elif isinstance(error, ProviderError):
                # One lost reply is asked for again; who never answered at all is not there.
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
    """Refuse what is not offered, not within limits or above the price cap, and say the price.

    Args:
        config: What would be asked for.
        provider: Whom.
        prices: To hold the cap against.
        held: What counts against `launch.limits` already.
        progress: Told of zones that are passed over, and of the price.

    Raises:
        ConfigError: The provider has no such terms.
        PodUnavailable: It has no such chips, or none within the limits and the price cap.
    """
    offered, where = provider.capabilities, config.slice
    check_terms(provider.name, offered, config)
    if offered.generations and where.chip.name not in offered.generations:
        why = offered.refused.get(where.chip.name)
        raise PodUnavailable(
            f"'{provider.name}' has no {where.chip.name}{f' ({why})' if why else ''}; it has "
            f"{', '.join(offered.generations)}. Another provider may: --provider gke.",
            cause=Cause.UNPLACEABLE.value,
        )
    zones = zones_within_limits(
        config, offered.zones_for(config), limits=offered.limits, held=held, progress=progress
    )
    for zone in zones_within_cap(config, zones, provider=provider.name, book=prices)[:1]:
        price = price_of(config, zone=zone, provider=provider.name, book=prices)
        if price.value is not None:
            progress(
                f"{where} {config.tier} in {zone} is ${price.value:.2f} an hour "
                f"({catalogue_age(price)})"
            )


def wait_until_gone(
    reconciler: Reconciler, name: str, wait_s: float, *, patience: float = math.inf
) -> None:
    """Reconcile until a released pod is forgotten, or time is up: its deletion is under way then.

    Args:
        reconciler: Who deletes it.
        name: Of the run.
        wait_s: How long to look.
        patience: Failures in a row after which the provider counts as gone.

    Raises:
        TPUError: The provider could not be opened or reached in that time, or so often.
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
